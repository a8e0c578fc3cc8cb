"""The operations of a composite call, such as ``multi_head_attention_forward`` or ``lstm_cell``.

Such a call is one node of Dynamo's graph and reads several weights. It is traced on the example values of its
arguments, below autograd. The result is exactly the operations that autograd would record, so the computation
does not change.

Invariant: a call that cannot be traced alone has no operations here, and stays as it is.
"""

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils import _pytree as pytree

from ddpopt.graph.nodes import example_value, with_values
from ddpopt.graph.state import State

logger = logging.getLogger("ddpopt")


def can_trace(node: fx.Node) -> bool:
    """Whether a call is a plain function of tensors with static shapes."""
    if node.op not in ("call_function", "call_method") or isinstance(node.target, HigherOrderOperator):
        return False
    values = [example_value(source) for source in node.all_input_nodes]
    leaves = pytree.tree_leaves(values)
    fake = all(isinstance(leaf, FakeTensor) and not free_symbols(leaf) for leaf in leaves)
    return fake and not any(source.op == "get_attr" for source in node.all_input_nodes)


def trace_call(node: fx.Node, state: State) -> fx.GraphModule | None:
    """The operations of one call as a graph over its input nodes; None if it cannot be traced alone."""
    sources = node.all_input_nodes

    def call(*values: object) -> object:
        given = dict(zip(sources, values, strict=True))
        args, kwargs = with_values((node.args, node.kwargs), given.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function's target is callable

    # as AOTAutograd traces: some operators are composed of others by Python code only
    with _settings(state), enable_python_dispatcher():
        try:
            values = [*map(example_value, sources)]
            operations = make_fx(call)(*values)
            # a call's own writes would forbid cuts; a composite call is not functionalized until it is traced
            traced = make_fx(torch.func.functionalize(operations))(*values)
        except Exception:  # whatever it is, the unexpanded call is still correct
            logger.info("ddpopt: %s cannot be expanded", node.name, exc_info=True)
            return None
    traced.graph.eliminate_dead_code()
    return None if traced.graph.find_nodes(op="get_attr") else traced  # these are constants


@contextlib.contextmanager
def _settings(state: State) -> Iterator[None]:
    """Autocast as in `state`, without a cache: each node that reads a weight casts it again."""
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        for span in state.autocast:
            device, dtype, enabled, _ = span.args
            stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))  # type: ignore[arg-type]
        stack.enter_context(torch.enable_grad())
        yield
