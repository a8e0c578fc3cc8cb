"""Turn the changing numbers of a graph into tensors, for backends that take numbers for constants.

Invariant: the graph computes the same, but may round differently where a number scaled another operand.
"""

import operator
from typing import Any

import torch
from torch import fx

from ddpopt.errors import UnsupportedError

aten: Any = torch.ops.aten
ARITHMETIC = (operator.neg, operator.add, operator.sub, operator.mul, operator.truediv, operator.pow)
TENSOR_OF = {
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor,
    aten._foreach_mul_.Scalar: aten._foreach_mul_.Tensor,
    aten._foreach_mul.Scalar: aten._foreach_mul.Tensor,
    aten._foreach_div_.Scalar: aten._foreach_div_.Tensor,
    aten._foreach_div.Scalar: aten._foreach_div.Tensor,
}
TAKES_BOTH = (
    aten.mul.Tensor, aten.mul_.Tensor, aten.div.Tensor, aten.div_.Tensor, aten.add.Tensor, aten.add_.Tensor,
    aten.sub.Tensor, aten.sub_.Tensor, aten.rsub.Tensor,
)  # fmt: skip


def numbers_as_tensors(gm: fx.GraphModule) -> None:
    """Read no number from a tensor: use the tensor itself.

    Args:
        gm: the graph, which is changed.

    Raises:
        UnsupportedError: an operation takes such a number, but no tensor instead.
    """
    numbers: dict[fx.Node, None] = {}
    for node in [*gm.graph.nodes]:
        if node.target == aten._local_scalar_dense.default:
            numbers[node] = None
        elif node.op == "call_function" and any(each in numbers for each in node.all_input_nodes):
            if node.target in ARITHMETIC:
                numbers[node] = None
            else:
                _adapt(gm.graph, node, numbers)
    for node in gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    gm.recompile()


def _adapt(graph: fx.Graph, node: fx.Node, numbers: dict[fx.Node, None]) -> None:
    target: Any = node.target
    scale = next((key for key in ("alpha", "value") if node.kwargs.get(key) in numbers), None)
    with graph.inserting_before(node):
        if scale is None and target in TENSOR_OF:
            node.target = TENSOR_OF[target]
        elif not (target in TAKES_BOTH if scale is None else _scales(graph, node, scale)):
            raise UnsupportedError(f"{target} takes a number that changes")


def _scales(graph: fx.Graph, node: fx.Node, scale: str) -> bool:
    """Multiply by a number first, instead of passing it; false for an operation that is not known."""
    target: Any = node.target
    name, number = target._schema.name.partition("::")[2], node.kwargs[scale]
    rest = {key: value for key, value in node.kwargs.items() if key != scale}

    def call(op: Any, *args: Any) -> fx.Node:
        return graph.call_function(op, args)

    if name in ("add", "add_", "sub", "sub_"):
        node.args = (node.args[0], call(aten.mul.Tensor, node.args[1], number))
    elif name in ("addcdiv", "addcdiv_", "addcmul", "addcmul_"):
        first, second = node.args[1:]
        product = call(aten.div.Tensor if "div" in name else aten.mul.Tensor, first, second)
        node.target = aten.add_.Tensor if name.endswith("_") else aten.add.Tensor
        node.args = (node.args[0], call(aten.mul.Tensor, product, number))
    elif name in ("_foreach_add", "_foreach_add_", "_foreach_sub", "_foreach_sub_"):
        others: Any = node.args[1]
        node.args = (node.args[0], [call(aten.mul.Tensor, each, number) for each in others])
    else:
        return False
    node.kwargs = rest
    return True
