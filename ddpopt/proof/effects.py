"""What a graph node does besides computing a value: which tensors it writes, and whether it draws.

Dynamo's graphs hold functions, methods and operators as the user wrote them, and only some have a schema.
So in-place work is told by notation (``add_``, ``+=``, ``out=``, ``inplace=True``), by schema, and for the
few functions that update an argument without saying so, by a table. Where nothing is certain, a node is
taken to write, or to draw: that only puts one more node into a sequence whose order must be kept.

Invariant: serves the certificate only, and shares no code with what plans or cuts.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ddpopt.proof.steps import Step, storage_of, tensors_in, value_on
from ddpopt.proof.terms import Group, Held, leaves

_WRITING_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow",
        "irshift", "isub", "itruediv", "ixor", "setitem", "delitem",
    )
)  # fmt: skip
_NORM_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var")
_RESHAPING_NAMES = frozenset(
    (
        "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_",
        "transpose_", "unsqueeze_",
    )
)  # fmt: skip
_DRAWING_WORDS = (
    "dropout",
    "rand",
    "rng_state",
    "seed",
    "gumbel",
    "fractional_max_pool",
    "multi_head_attention",
)


class Call(NamedTuple):
    """What a node calls, and on what: arguments may be nodes or terms."""

    op: str
    callee: object
    args: Sequence[object]
    kwargs: Mapping[str, object]


def call_of(step: Step) -> Call:
    """What a step calls, for a question about its effects."""
    return Call(step.node.op, step.callee, step.args, step.kwargs)


def written(call: Call) -> Iterator[object]:
    """The arguments of `call` whose tensors it writes to; one argument may come up twice."""
    if "out" in call.kwargs:
        yield call.kwargs["out"]
    if call.op == "call_method":
        if _writes_by_name(str(call.callee)):
            yield from call.args[:1]
    elif call.op == "call_module":
        yield Held("module state", call.callee, call.callee)
    elif isinstance(call.callee, torch._ops.HigherOrderOperator):
        yield from _written_by_body(call)
    elif isinstance(call.callee, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        yield from _written_by_schema(call, _overloads(call.callee))
    elif call.callee in _WRITING_OPERATORS or _writes_by_name(getattr(call.callee, "__name__", "")):
        yield from call.args[:1]
    else:
        yield from _written_by_function(call)


def draws(call: Call) -> bool:
    """Whether `call` may take numbers from a random generator, or set one."""
    if call.op == "call_module" or isinstance(call.callee, torch._ops.HigherOrderOperator):
        return True
    if isinstance(call.callee, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _any_draws(_overloads(call.callee))
    return _draws_by_name(
        call.callee if isinstance(call.callee, str) else getattr(call.callee, "__name__", "")
    )


def reshapes(call: Call) -> bool:
    """Whether `call` changes the shape or the strides of what it writes to."""
    name = call.callee if isinstance(call.callee, str) else getattr(call.callee, "__name__", "")
    return name in _RESHAPING_NAMES


def _writes_by_name(name: str) -> bool:
    if name.startswith("__") and name.endswith("__"):
        return getattr(operator, name[2:-2], None) in _WRITING_OPERATORS
    return name.endswith("_")


def _written_by_body(call: Call) -> Iterator[object]:
    """The operands that a body writes to; all of them where it cannot be told which.

    A single body takes the operands in order. With several, which one means what differs from operator to
    operator. What a body writes to among its own values is nobody else's.
    """
    arguments = [leaf for value in (*call.args, *call.kwargs.values()) for leaf in leaves(value)]
    bodies = list(filter(None, map(_body, arguments)))
    places = [place for body in bodies for place in _places_written(body)]
    if "mutation" not in str(call.callee) and not places:
        return
    operands = [leaf for value in call.args for leaf in leaves(value) if _body(leaf) is None]
    known = [operands[place] for place in places if place is not None and place < len(operands)]
    if len(bodies) == 1 and known and len(known) == len(places):
        yield from known
    else:
        yield Group(tuple, tuple(arguments))


def _body(leaf: object) -> fx.GraphModule | None:
    """The body that an argument of a higher-order operator is, if it is one."""
    return leaf.value if isinstance(leaf, Held) and isinstance(leaf.value, fx.GraphModule) else None


def _places_written(body: fx.GraphModule) -> Iterator[int | None]:
    """Which of its inputs a body writes to, by their places; None for a write that cannot be followed."""
    inputs = {node: place for place, node in enumerate(body.graph.find_nodes(op="placeholder"))}
    places: dict[int, int | None] = {}
    for node in (*inputs, *body.graph.find_nodes(op="get_attr")):
        for key in filter(None, map(storage_of, tensors_in(value_on(node)))):
            places.setdefault(key, inputs.get(node))
    for value in _values_written(body):
        keys = list(map(storage_of, tensors_in(value_on(value)))) if isinstance(value, fx.Node) else []
        if value in inputs:
            yield inputs[value]
        elif not keys or None in keys:
            yield None
        else:
            yield from (places[key] for key in keys if key in places)


def _values_written(body: fx.GraphModule) -> Iterator[object]:
    """What the nodes of a body write to, and those of the bodies in it."""
    graphs = [module.graph for module in body.modules() if isinstance(module, fx.GraphModule)]
    calls = (node for graph in graphs for node in graph.nodes if node.op in ("call_function", "call_method"))
    for node in calls:
        for value in written(Call(node.op, node.target, node.args, node.kwargs)):
            yield from (leaf for leaf in pytree.tree_leaves(value) if leaf is not None)


def _overloads(
    callee: torch._ops.OpOverload | torch._ops.OpOverloadPacket,
) -> tuple[torch._ops.OpOverload, ...]:
    if isinstance(callee, torch._ops.OpOverload):
        return (callee,)
    return tuple(getattr(callee, name) for name in callee.overloads())  # type: ignore[no-untyped-call]  # torch's own


def _written_by_schema(call: Call, overloads: Sequence[torch._ops.OpOverload]) -> Iterator[object]:
    for overload in overloads:
        for place, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if argument.name in call.kwargs:
                yield call.kwargs[argument.name]
            elif place < len(call.args) and not argument.kwarg_only:
                yield call.args[place]


def _written_by_function(call: Call) -> Iterator[object]:
    names = _argument_names(call.callee) if callable(call.callee) else ()
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    if given.get("inplace", False) is not False:
        yield given.get(names[0] if names else "input")
    if "running_mean" in given and given.get("training", given.get("use_input_stats")) is not False:
        yield from (given["running_mean"], given.get("running_var"))
    if given.get("max_norm") is not None:
        yield given.get("weight")


@functools.lru_cache(maxsize=4096)
def _argument_names(callee: Callable[..., object]) -> tuple[str, ...]:
    """Names of positional arguments, where they can be known."""
    if callee in (torch.batch_norm, torch.native_batch_norm):
        return (*_NORM_ARGUMENTS, "training")
    if callee is torch.instance_norm:
        return (*_NORM_ARGUMENTS, "use_input_stats")
    try:
        return tuple(inspect.signature(callee).parameters)
    except (TypeError, ValueError):  # other builtins of torch have no signature, and name what they write
        return ()


def _any_draws(overloads: Sequence[torch._ops.OpOverload]) -> bool:
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


@functools.lru_cache(maxsize=4096)
def _draws_by_name(name: str) -> bool:
    """Whether a function or method is random, by the operator of the same name or by a word in its name."""
    if any(word in name for word in _DRAWING_WORDS):
        return True
    packet = (
        getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    )
    return isinstance(packet, torch._ops.OpOverloadPacket) and _any_draws(_overloads(packet))
