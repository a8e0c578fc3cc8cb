"""The side effects of graph nodes: the tensors that each one may write to.

Dynamo's graphs hold functions, methods and operators as the user wrote them. The writes of each one follow
from the schema of the torch operator with its name, from Python's naming of in-place operations, and for the
few that write without saying so, from a table. This covers only torch, Python's operators and its math
functions. Any other call (a function that Dynamo puts into the graph without tracing it, a kernel, a user's
module, a NumPy function) may write to all of its inputs. A call with bodies writes what its bodies write.

Invariant: a tensor that `mutated_inputs` does not name is not written to; in doubt, a tensor is named.
Planning, cutting and proof all use this module.
"""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

from ddpopt.graph.nodes import MISSING, SOURCES, by_storage, example_value, fetch, requires_grad, storages

WRITING_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow",
        "irshift", "isub", "itruediv", "ixor", "setitem", "delitem",
    )
)  # fmt: skip
DESCRIBING_NAMES = (
    "as_strided_", "detach_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_",
    "transpose_", "unsqueeze_",
)  # fmt: skip
FORGETTING_NAMES = (
    "add", "addbmm", "addcdiv", "addcmul", "addmm", "addmv", "baddbmm", "copy", "fill", "foreach_add", "iadd",
    "foreach_copy", "index_add", "index_copy", "index_fill", "index_put", "isub", "masked_fill",
    "masked_scatter", "neg", "scatter", "scatter_add", "setitem", "sub", "zero",
)  # fmt: skip
"""Writes whose backward does not need what was overwritten, without underscores at either end."""
KNOWN_MODULES = (
    "_operator", "builtins", "cmath", "math", "torch", "torch._linalg_utils", "torch._lowrank",
    "torch._tensor", "torch.functional", "torch.random",
)  # fmt: skip
KNOWN_PACKAGES = (
    "einops.", "torch._C._functorch.", "torch._dynamo.compiled_autograd.", "torch._functorch.",
    "torch.amp.", "torch.distributed.tensor.", "torch.nested.", "torch.nn.",
)  # fmt: skip
"""Packages whose functions write only to what their names and arguments say; Dynamo knows einops."""
KNOWN_BUILTINS = ("asarray", "_get_data_attr")
"""Functions of torch that are neither Python functions nor operators, and do not write."""
UNMARKED: Mapping[str, tuple[str, ...]] = {
    "_copy_from": ("dst",),
    "_copy_from_and_resize": ("dst",),
    "_resize_output": ("self",),
    "_tensor_version": ("self",),
    "_unsafe_set_version_counter": ("t",),
}
"""Arguments that operators write to (or whose version they use) unmarked; `_written_by` has the others."""
IMPLICIT = ("out", "inplace", "running_mean", "running_var", "max_norm")
"""Arguments of any function that it writes to, or that make it write to another one."""
VERSION_NAMES = ("_tensor_version", "_unsafe_set_version_counter")
"""Operators that read or set how often a tensor was written to; they count as writes."""
COLLECTIVES = ("torch._ops._c10d", "torch._ops._dtensor", "torch._ops.c10d", "torch._ops.symm_mem")
"""Modules of the operators that communicate."""
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
KINDS = (
    str, OpOverload, OpOverloadPacket, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.BuiltinFunctionType,
)  # fmt: skip
"""Kinds of callables that Python or torch's C++ defines, and that a name identifies."""


@dataclass(frozen=True)
class Signature:
    """The arguments of a callable: names of positional ones, all defaults, and those it always writes to."""

    names: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    @functools.cached_property
    def may_write(self) -> bool:
        """Whether a call without keyword arguments may write to anything."""
        return not {*self.written, *IMPLICIT}.isdisjoint([*self.names, *self.defaults])


def mutated_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """The input nodes whose tensors `node` may write to, in argument order; empty for a pure node."""
    if node.op in (*SOURCES, "output"):
        return ()
    return tuple(dict.fromkeys(_mutated(node)))


def constructed_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """The inputs that `node` certainly writes to, and neither reads in another way nor keeps for backward."""
    name = name_of(node.target)
    if not is_known(node) or isinstance(node.target, HigherOrderOperator) or name in VERSION_NAMES:
        return ()
    forgets = name.strip("_") in FORGETTING_NAMES
    return tuple(n for n in mutated_inputs(node) if forgets or not requires_grad(example_value(n)))


def written_storages(node: fx.Node) -> dict[int, None]:
    """Identities of the storages that `node` may write to."""
    return {key: None for source in mutated_inputs(node) for key in storages(source)}


def is_known(node: fx.Node) -> bool:
    """Whether the writes of `node` are known, not assumed."""
    if node.op == "call_module":
        return _is_of_torch(_attribute(node))
    return isinstance(node.target, HigherOrderOperator) or bool(_signatures(node.target))


def redescribes(node: fx.Node) -> bool:
    """Whether `node` changes a tensor's metadata: its shape, its strides, or whether it requires grad."""
    return name_of(node.target) in DESCRIBING_NAMES


def _nodes_of_bodies(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the bodies that a call is given, and of all graphs nested in them."""
    for part in (part for body in _bodies(node).values() for part in body.modules()):
        yield from part.graph.nodes if isinstance(part, fx.GraphModule) else ()


def communicates_in_backward(node: fx.Node) -> bool:
    """Whether the backward of `node` communicates: a collective with gradient, or one inside a body."""
    passes = requires_grad(example_value(node)) and _is_collective(node)
    return passes or any(map(_is_collective, _nodes_of_bodies(node)))


def _is_collective(node: fx.Node) -> bool:
    return str(getattr(node.target, "__module__", "")).startswith(COLLECTIVES)


def is_detached_view(node: fx.Node) -> bool:
    """Whether `node` returns memory of its input that has its own gradient, if it has one."""
    return name_of(node.target) in ("detach", "_get_data_attr")


def detaches(node: fx.Node) -> bool:
    """Whether `node` detaches a tensor in place; the tensor's example value is detached from the start."""
    return name_of(node.target) == "detach_"


# --- writes ------------------------------------------------------------------------------------------


def _mutated(node: fx.Node) -> Iterator[fx.Node]:
    if node.op == "call_module":
        yield from _written_by_module(node)
    elif isinstance(node.target, HigherOrderOperator):
        yield from _written_by_bodies(node)
    else:
        signatures = _signatures(node.target)
        for signature in (s for s in signatures if node.kwargs or s.may_write):
            yield from _nodes(_written_by(signature, node))
        if not signatures:
            yield from filter(_may_hold_tensor, node.all_input_nodes)


def _written_by(signature: Signature, node: fx.Node) -> Iterator[object]:
    """The arguments that a call of this signature writes to."""
    positional = zip(signature.names, node.args, strict=False)
    given: dict[str, Any] = {**signature.defaults, **dict(positional), **node.kwargs}
    yield from (given.get(name) for name in (*signature.written, "out"))
    if given.get("inplace", False) is not False:
        yield given.get(next(iter(signature.names), "input"))
    if given.get("training", given.get("use_input_stats")) is not False:  # a norm updates its statistics
        yield from (given.get("running_mean"), given.get("running_var"))
    if given.get("max_norm") is not None:
        yield given.get("weight")
    if given.get("run_check"):  # the first rank's local tensor goes into all
        yield given.get("local_tensor")


def _written_by_module(node: fx.Node) -> Iterator[fx.Node]:
    """A torch module writes to its first input if it is in-place; any other module to all of its inputs."""
    module = _attribute(node)
    if not _is_of_torch(module):
        yield from node.all_input_nodes
    elif getattr(module, "inplace", False):
        yield from _nodes(node.args[:1])


def _written_by_bodies(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that the bodies of a call write to, matched by storage.

    Yields all operands if there is no body, or if a body writes to a tensor that matches no operand.
    """
    bodies = _bodies(node)
    operands = [source for source in node.all_input_nodes if source not in bodies]
    outside = by_storage(operands)
    for body in bodies.values():
        own = {key for inner in body.graph.nodes if inner.op not in SOURCES for key in storages(inner)}
        given = {key for inner in body.graph.nodes if inner.op in SOURCES for key in storages(inner)}
        for written in (source for inner in body.graph.nodes for source in mutated_inputs(inner)):
            keys = storages(written)
            known = [key for key in keys if key in outside or key in own - given]
            yield from (operand for key in known for operand in outside.get(key, ()))
            if not keys or len(known) < len(keys):
                yield from filter(_may_hold_tensor, operands)
    if not bodies:
        yield from filter(_may_hold_tensor, operands)


def _may_hold_tensor(node: fx.Node) -> bool:
    return example_value(node) is MISSING or bool(storages(node))


def _bodies(node: fx.Node) -> dict[fx.Node, fx.GraphModule]:
    """The graph modules that are arguments of a higher-order operator, by the nodes that name them."""
    held = {source: _attribute(source) for source in node.all_input_nodes if source.op == "get_attr"}
    return {source: body for source, body in held.items() if isinstance(body, fx.GraphModule)}


def _attribute(node: fx.Node) -> object:
    """The attribute or module that the target of a node names, or None."""
    return fetch(node.graph.owning_module, str(node.target), None)


def _is_of_torch(module: object) -> bool:
    return type(module).__module__.startswith("torch.nn.")


# --- signatures --------------------------------------------------------------------------------------


def _signatures(target: object) -> tuple[Signature, ...]:
    """The possible signatures of `target`; empty if its writes are unknown."""
    # a user's callable may hold a reference to a model, so it must not be cached
    return _signatures_of(target) if isinstance(target, KINDS) or _is_known(target) else ()


def _is_known(function: object) -> bool:
    """Whether a function's module guarantees that its name and arguments show what it writes to."""
    module = getattr(function, "__module__", None) or ""
    return module in KNOWN_MODULES or f"{module}.".startswith(KNOWN_PACKAGES)


@functools.lru_cache(maxsize=4096)
def _signatures_of(target: Any) -> tuple[Signature, ...]:
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return tuple(map(_of_schema, _overloads(target)))
    if isinstance(target, (str, types.MethodDescriptorType, types.WrapperDescriptorType)):
        return _of_method(name_of(target))
    if target in WRITING_OPERATORS:
        return (Signature(("a",), written=("a",)),)
    module = getattr(target, "__module__", None) or ""
    if isinstance(target, types.BuiltinFunctionType) and module.startswith("torch"):
        of_operator = _of_operator(name_of(target))
        if of_operator:
            return of_operator
        known = name_of(target) in KNOWN_BUILTINS or f"{module}.".startswith(KNOWN_PACKAGES)
        return (Signature(),) if known else ()
    return (_of_function(target),) if callable(target) and _is_known(target) else ()


def _of_schema(overload: OpOverload) -> Signature:
    arguments = overload._schema.arguments
    marked = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    unmarked = UNMARKED.get(name_of(overload), ())
    names = tuple(a.name for a in arguments if not a.kwarg_only)
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return Signature(names, defaults, (*marked, *unmarked))


def _of_method(name: str) -> tuple[Signature, ...]:
    """A tensor method; its first argument is named ``self``, as in torch's schemas."""
    if name.startswith("__"):
        return (_of_self(writes=getattr(operator, name.strip("_"), None) in WRITING_OPERATORS),)
    of_operator = _of_operator(name)
    if of_operator:
        return of_operator
    known = hasattr(torch.Tensor, name) or name in ("redistribute", "to_local")  # the last two of DTensor
    return (_of_self(writes=name.endswith("_")),) if known else ()


def _of_self(*, writes: bool) -> Signature:
    return Signature(("self",), written=("self",) if writes else ())


def _of_operator(name: str) -> tuple[Signature, ...]:
    """The signatures of the torch operator with this name; empty if there is none."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and name[:2] != "__" else None
    return _signatures_of(packet) if isinstance(packet, OpOverloadPacket) else ()


def _of_function(target: Callable[..., object]) -> Signature:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return Signature()
    # what follows *args can only be given by name
    names = tuple(name for name, parameter in parameters.items() if parameter.kind in POSITIONAL)
    module = getattr(target, "__module__", "")
    in_place = target.__name__.endswith("_") and module.startswith("torch")
    written = names[:1] if in_place else UNMARKED.get(target.__name__, ())
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    return Signature(names, defaults, written)


def _overloads(callee: OpOverload | OpOverloadPacket) -> tuple[OpOverload, ...]:
    if isinstance(callee, OpOverload):
        return (callee,)
    found = (getattr(callee, name) for name in callee.overloads())  # type: ignore[no-untyped-call]  # torch's own
    # TorchScript sorts its lists in place by overloads of the operator that sorts tensors
    return tuple(
        o for o in found if o._schema.name != "aten::sort" or "List" not in str(o._schema.arguments[0].type)
    )


def name_of(target: object) -> str:
    """The name of a target; for an operator overload, the name of the operator."""
    if isinstance(target, OpOverload):
        target = target.overloadpacket
    name: str = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name


def _nodes(arguments: Iterable[object]) -> list[fx.Node]:
    """The nodes in arguments."""
    return [leaf for leaf in pytree.tree_leaves([*arguments]) if isinstance(leaf, fx.Node)]
