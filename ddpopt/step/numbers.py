"""Turn the changing numbers of a graph into tensors, for backends that take numbers for constants.

Invariant: the graph computes the same, in the same dtypes, but may round differently where a number scaled
another operand.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ddpopt.errors import UnsupportedError

aten: Any = torch.ops.aten
ARITHMETIC = (operator.neg, operator.add, operator.sub, operator.mul, operator.truediv, operator.pow)
FOREACH = "_foreach_"
SCALED = ("alpha", "value")
"""Arguments that are numbers in every overload."""
Numbers = dict[fx.Node, None]


def numbers_as_tensors(gm: fx.GraphModule) -> None:
    """Read no number from a tensor: use the tensor itself.

    Args:
        gm: the graph, which is changed; ``meta["val"]`` of its nodes has what they return.

    Raises:
        UnsupportedError: an operation takes such a number, but no tensor instead.
    """
    numbers: Numbers = {}
    for node in [*gm.graph.nodes]:
        if node.target == aten._local_scalar_dense.default:
            numbers[node] = None
        elif node.op == "call_function" and any(each in numbers for each in node.all_input_nodes):
            if node.target in ARITHMETIC:
                numbers[node] = None
            else:
                for each in _singles(gm.graph, node):
                    _adapt(gm.graph, each, numbers)
    for node in gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    gm.recompile()


def _name(target: Any) -> str:
    return str(getattr(getattr(target, "overloadpacket", target), "__name__", target))


def _singles(graph: fx.Graph, node: fx.Node) -> Sequence[fx.Node]:
    """An operation on lists of tensors as one operation for each tensor; any other as it is."""
    name = _name(node.target)
    if not name.startswith(FOREACH):
        return [node]
    packet: Any = getattr(aten, name.removeprefix(FOREACH))
    rows = [each for each in node.args if isinstance(each, (list, tuple))]
    values: Any = node.meta.get("val") or [each.meta["val"] for each in rows[0]]  # type: ignore[union-attr]
    found = []
    for place, value in enumerate(values):
        args: Any = [each[place] if isinstance(each, (list, tuple)) else each for each in node.args]
        kwargs = dict(node.kwargs)
        if len(args) > 3:  # addcdiv and addcmul
            kwargs["value"] = args.pop()
        with graph.inserting_before(node):
            single = graph.call_function(getattr(packet, packet.overloads()[0]), tuple(args), kwargs)
        single.meta["val"] = value
        found.append(single)
    for user in [*node.users]:
        user.replace_all_uses_with(found[user.args[1]])  # type: ignore[index]  # it gets an item
        graph.erase_node(user)
    graph.erase_node(node)
    return found


def _adapt(graph: fx.Graph, node: fx.Node, numbers: Numbers) -> None:
    """Let an operation take tensors where it takes numbers that change."""
    value, name = node.meta.get("val"), _name(node.target)
    with graph.inserting_before(node):
        if not _rewritten(graph, node, name.rstrip("_"), numbers):
            overload = _taking_tensors(node)
            if overload is None:
                raise UnsupportedError(
                    f"{node.target} takes a number that changes from step to step, which this backend takes "
                    "for a constant; make the number a tensor, or use backend='aot_eager'"
                )
            node.target = overload
    operands = [each.meta.get("val") for each in node.all_input_nodes if each not in numbers]
    if isinstance(value, Tensor) and not name.endswith("_") and any(map(_is_promoted, operands)):
        with graph.inserting_after(node):
            cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": value.dtype})
        cast.meta = dict(node.meta)
        node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def _is_promoted(operand: object) -> bool:
    """Whether the dtype of a tensor changes next to a tensor of one number, but not next to a number."""
    return not isinstance(operand, Tensor) or operand.dim() == 0 or not operand.is_floating_point()


def _taking_tensors(node: fx.Node) -> Any:
    """The overload that takes tensors for all numbers that change; None if there is none."""
    packet = getattr(node.target, "overloadpacket", None)
    for name in packet.overloads() if packet else ():
        overload = getattr(packet, name)
        known = {each.name: each for each in overload._schema.arguments}
        given = [*zip(overload._schema.arguments, node.args, strict=False)]
        if len(given) == len(node.args) and known.keys() >= node.kwargs.keys():
            given += [(known[key], each) for key, each in node.kwargs.items()]
            if all(("Tensor" in str(argument.type)) is isinstance(each, fx.Node) for argument, each in given):
                return overload
    return None


def _rewritten(graph: fx.Graph, node: fx.Node, name: str, numbers: Numbers) -> bool:
    """Multiply by a number instead of passing it; false where that is not needed, or not known."""
    args: Any = node.args
    scale: Any = next((node.kwargs[key] for key in SCALED if node.kwargs.get(key) in numbers), None)
    rest = {key: each for key, each in node.kwargs.items() if each is not scale}

    def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(op, args, kwargs)

    if name in ("add", "sub") and scale is not None:
        added, sign = call(aten.mul.Tensor, args[1], scale), name
    elif name in ("addcdiv", "addcmul") and scale is not None:
        product = call(aten.div.Tensor if name == "addcdiv" else aten.mul.Tensor, *args[1:3])
        added, sign = call(aten.mul.Tensor, product, scale), "add"
    elif name == "lerp" and args[2] in numbers:
        added, sign = call(aten.mul.Tensor, call(aten.sub.Tensor, args[1], args[0]), args[2]), "add"
    elif name in ("full", "full_like") and args[1] in numbers:
        node.args = (call(node.target, args[0], 1, **node.kwargs), args[1])
        node.target, node.kwargs = aten.mul.Tensor, {}
        return True
    elif name == "scalar_tensor":
        value = node.meta["val"]
        node.target, node.kwargs = aten._to_copy.default, {"dtype": value.dtype, "device": value.device}
        return True
    else:
        return False
    node.target = getattr(aten, sign + "_" * _name(node.target).endswith("_")).Tensor
    node.args, node.kwargs = (args[0], added), rest
    return True
