"""Where a graph can be cut: at positions where everything that crosses can safely cross a cut.

A cut hands values from one compiled piece to the next. Tensors, numbers and tuples of them can cross; a
stream, a functorch level or two views of a tensor that is mutated later cannot.

Invariant: a position that is not blocked can be cut without changing what the program computes.
"""

import contextlib
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ddpopt.graph.aliases import first_names, is_view
from ddpopt.graph.effects import (
    constructed_inputs,
    is_detached_view,
    is_known,
    mutated_inputs,
    redescribes,
    written_storages,
)
from ddpopt.graph.nodes import (
    body_nodes,
    example_value,
    is_scalar,
    overlaps_itself,
    read_storages,
    requires_grad,
    storages,
)
from ddpopt.graph.state import AUTOCAST, GRAD_MODE, states

CROSSABLE = (
    torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format, slice,
)  # fmt: skip
HOOKS_OFF = torch._C._autograd._saved_tensors_hooks_disable
HOOKS_ON = torch._C._autograd._saved_tensors_hooks_enable


@dataclass(frozen=True)
class Span:
    """Positions `first` to `last` (inclusive) where no cut is possible, and why."""

    first: int
    last: int
    why: str


class Body:
    """The body of a graph: the position of each node, and of the last write to each storage."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes = body_nodes(graph)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.written = {key: index for index, node in enumerate(self.nodes) for key in written_storages(node)}

    @cached_property
    def made(self) -> dict[int, int]:
        """For each storage, the position of the first node that has it; -1 if it is an input of the graph."""
        nodes = reversed(self.graph.nodes)
        return {key: self.position.get(node, -1) for node in nodes for key in storages(node)}

    @cached_property
    def last_read(self) -> dict[int, int]:
        """For each storage, the position of the last reader of any node that has it, as in `last_use`."""
        found: dict[int, int] = {}
        for node in self.graph.nodes:
            for key in storages(node):
                found[key] = max(found.get(key, -1), self.last_use(node))
        return found

    def last_use(self, node: fx.Node) -> int:
        """Position of the last reader of a node; past the last node if the graph returns it."""
        return max((self.position.get(user, len(self.nodes)) for user in node.users), default=-1)

    def blocked(self, spans: Iterable[Span]) -> tuple[str | None, ...]:
        """For each position, why no cut may lie right before it, or None."""
        blocked: list[str | None] = [None] * len(self.nodes)
        filled = 0
        for span in sorted(spans, key=lambda s: s.first):
            for index in range(max(filled, span.first), min(span.last + 1, len(blocked))):
                blocked[index] = span.why
            filled = max(filled, span.last + 1)
        return tuple(blocked)


def blocked_positions(
    graph: fx.Graph, carriers: Container[fx.Node], others: Iterable[Span] = ()
) -> tuple[str | None, ...]:
    """For each body position, why no cut may lie right before it, or None.

    Args:
        graph: a graph.
        carriers: its nodes whose backward runs.
        others: additional spans.
    """
    body = Body(graph)
    found = itertools.chain.from_iterable(find(body) for find in OBSTACLES)
    return body.blocked([*others, *_without_backward(body, carriers), *found])


def _without_backward(body: Body, carriers: Container[fx.Node]) -> Iterator[Span]:
    """From a value that requires grad, but gets no gradient, to its last reader.

    A segment that returned it would run its backward, with zeros; times infinity these are NaN.
    """
    for node, state in states(body.graph):
        is_dead = state.grad_enabled and node not in carriers and requires_grad(example_value(node))
        if is_dead and _crossable(example_value(node)):
            yield Span(body.position[node] + 1, body.last_use(node), f"{node.name!r} gets no gradient")


# --- values and global state -------------------------------------------------------------------------


def _uncrossable(body: Body) -> Iterator[Span]:
    """From a node whose value cannot cross a cut (a stream, a generator) to its last reader."""
    for index, node in enumerate(body.nodes):
        if node.users and node.target not in AUTOCAST and not _crossable(example_value(node)):
            why = f"{node.name!r} returns a value that cannot cross a cut"
            yield Span(index + 1, body.last_use(node), why)


def _crossable(value: object) -> bool:
    leaves = pytree.tree_leaves(value)
    return all(isinstance(leaf, CROSSABLE) and not _cannot_be_input(leaf) for leaf in leaves)


def _cannot_be_input(value: object) -> bool:
    """Whether AOTAutograd mistreats a tensor, or cannot take it as an input.

    It assumes that the gradient of a lazily conjugated or negated tensor is so, too, loses parts of the
    gradient of a tensor that overlaps itself, and expects the gradient of a tensor subclass to be one, too. A
    sparse tensor has no storage that a segment could return. torch cannot make a fake copy of a nested
    tensor's view, nor of a view of real numbers as another dtype.
    """
    if not isinstance(value, torch.Tensor):
        return False
    base: torch.Tensor | None = value._base
    odd = base is not None and (base.is_nested or (base.dtype != value.dtype and not base.is_complex()))
    odd = odd or value.is_conj() or value.is_neg() or value.is_nested or overlaps_itself(value)
    odd = odd or value.layout != torch.strided or is_traceable_wrapper_subclass(value)
    return odd or torch._C._functorch.is_functorch_wrapped_tensor(value)


def _with_sparse_gradient(body: Body) -> Iterator[Span]:
    """From a value whose gradient is sparse to the reader that makes it so; AOTAutograd expects a dense one.

    What the value is computed from may get a sparse gradient, too, as with ``table * 2``.
    """
    for index, node in enumerate(body.nodes):
        pending = [node] if node.op == "call_function" and _makes_sparse_gradients(node) else []
        seen = {*pending}
        for reader in pending:
            for source in reader.all_input_nodes:
                if source not in seen and source in body.position and requires_grad(example_value(source)):
                    seen.add(source)
                    yield Span(body.position[source] + 1, index, f"{node.name!r} makes a sparse gradient")
                    pending.append(source)


def _makes_sparse_gradients(node: fx.Node) -> bool:
    """Whether a call has an argument ``sparse`` or ``sparse_grad`` that is on."""
    if not any(each is True for each in (*node.args, *node.kwargs.values())):
        return False  # nearly always; a signature takes long to find
    given = dict(node.kwargs)
    with contextlib.suppress(TypeError, ValueError):  # torch's builtin functions have no signature
        given |= (
            inspect.signature(cast("Callable[..., Any]", node.target)).bind(*node.args, **given).arguments
        )
    return any(given.get(name) is True for name in ("sparse", "sparse_grad"))


def _transforms(body: Body) -> Iterator[Span]:
    """Inside a functorch level (``torch.func.grad``, ``vmap``), which must stay within one trace.

    Also where saved tensor hooks are disabled, as inside ``torch.func.grad``. The switch is per thread, so a
    segment that left them disabled would disable hooks for whatever is traced next. Nested spans disable them
    again, with the message of the outer span; the outermost span enables them.
    """

    def forbids(before: bool, node: fx.Node) -> bool:
        return node.target is HOOKS_OFF or (before and node.target is not HOOKS_ON)

    forbidden = itertools.accumulate(body.nodes, forbids, initial=False)
    levels = itertools.accumulate(map(_nesting, body.nodes), initial=0)
    why = ""  # of the span that began first
    for position, (hookless, depth) in enumerate(zip(forbidden, levels, strict=True)):
        if hookless or depth:
            here = "hooks on saved tensors are forbidden here" if hookless else "inside a functorch transform"
            why = why or here
            yield Span(position, position, why)
        else:
            why = ""


def _nesting(node: fx.Node) -> int:
    """The change that a node makes to the depth of functorch's levels."""
    name = getattr(node.target, "__name__", str(node.target))
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def _setters(body: Body) -> Iterator[Span]:
    """Between two calls that set the same global state (sdpa kernels, deterministic mode, …).

    State with its own spans is left out, and so is state that a functorch transform sets and resets itself.
    """
    first: dict[object, int] = {}
    depth = 0
    for index, node in enumerate(body.nodes):
        depth += (change := _nesting(node))
        sets_state = node.op == "call_function" and not node.users and not node.all_input_nodes
        spanned = node.target in (GRAD_MODE, *AUTOCAST, HOOKS_OFF, HOOKS_ON) or change or depth > 0
        if not sets_state or spanned or mutated_inputs(node):
            continue
        if node.target in first:
            yield Span(first[node.target] + 1, index, f"{node.name!r} overrides global state set before")
        else:
            first[node.target] = index


# --- writes ------------------------------------------------------------------------------------------


def _redescribed(body: Body) -> Iterator[Span]:
    """From a value that is reshaped or detached in place to the last reader of its storage, through any view.

    The example value from tracing shows the tensor after the change, so neither the earlier value nor a view
    of it can be described to another segment.
    """
    redescribed = {key: node for node in body.nodes if redescribes(node) for key in storages(node)}
    for key, node in redescribed.items():
        yield Span(body.made[key] + 1, body.last_read[key], f"{node.name!r} changes metadata in place")


def _recomputed_after_write(body: Body) -> Iterator[Span]:
    """From a value that reading segments recompute from a tensor that is written to, to its last reader.

    Such a value is a symbolic float or bool that is read from the tensor, or a view whose position depends on
    it. The segment would recompute it from the tensor's contents at that time.
    """
    for node in body.nodes if body.written else ():
        told_by = read_storages(node).keys() - storages(node)
        if told_by.isdisjoint(body.written):
            continue
        for is_taken, how in ((is_scalar, "read from"), (is_view, "a view whose place depends on")):
            if is_taken(node):
                last = max(map(body.last_use, _with_users(node, is_taken)))
                why = f"{node.name!r} is {how} a tensor that is written to"
                yield Span(body.position[node] + 1, last, why)


def _with_users(node: fx.Node, of_kind: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """A node and its users of one kind, transitively."""
    found = dict.fromkeys([node])
    pending = [node]
    for maker in pending:
        further = [user for user in maker.users if user not in found and of_kind(user)]
        found.update(dict.fromkeys(further))
        pending += further
    return pending


def _aliased_with_own_gradient(body: Body) -> Iterator[Span]:
    """From a value that shares another value's memory, but is no plain view of it, to its last reader.

    A compiled segment does not return views: they are recreated outside, from their base. This would lose the
    gradient of a custom function, and a hook, which applies to all readers of the value, including earlier
    ones. A detached tensor that is written to with gradient has a gradient that its base does not have.
    Autograd treats results of ``unsafe_split`` and similar operators as independent values: a write to one is
    not a write to the other.
    """
    for index, node in enumerate(body.nodes):
        name = getattr(node.target, "__name__", str(node.target))
        unsafe = name.lstrip("_").startswith("unsafe_")
        known = is_known(node) and not is_detached_view(node)
        apart = isinstance(node.target, HigherOrderOperator) or not known
        apart = apart and requires_grad(example_value(node))
        keys = Counter(storages(node)).items() if apart or unsafe else ()
        shared = {key for key, times in keys if times > 1 or key in read_storages(node)}
        if not shared or not (apart or not shared.isdisjoint(body.written)):
            continue
        last = max(map(body.last_use, _with_users(node, partial(_is_in, shared))))
        first = index
        if unsafe or name == "register_hook" or last == len(body.nodes):
            first = min(body.made[key] for key in shared)
            last = max(body.last_read[key] for key in shared)
        yield Span(first + 1, last, f"{node.name!r} shares another value's memory, but is no plain view")


def _is_in(shared: Set[int], node: fx.Node) -> bool:
    """Whether the value of a node is in one of these storages."""
    return not shared.isdisjoint(storages(node))


def up_to_last_write(body: Body) -> Iterator[Span]:
    """From the making, or the first use, of memory that is read before a write to it, to the last write.

    Writes then mean what they mean in the whole graph: a compiled segment may keep for its backward what it
    is given. Memory that is only written to, by one name, is a value under construction (a sum of losses, a
    table that is filled): nothing keeps it yet, and one segment may hand it to the next.
    """
    first = first_names(body.graph.nodes) if body.written else {}
    names: dict[int, fx.Node] = {}
    used: dict[int, int] = {}
    read: dict[int, int] = {}
    for index, node in enumerate(body.nodes if body.written else ()):
        given = read_storages(node)
        written = {key: first.get(n, n) for n in constructed_inputs(node) for key in storages(n)}
        for key in {**given, **dict.fromkeys(storages(node))}:
            used.setdefault(key, index)
            if key not in given:
                names.setdefault(key, node)
            elif key not in written or names.setdefault(key, written[key]) is not written[key]:
                read.setdefault(key, index)
    for key, last in body.written.items():
        if read.get(key, len(body.nodes)) <= last:
            writer = body.nodes[last]
            may = "writes" if is_known(writer) else "may write"
            yield Span(used[key] + 1, last, f"{writer.name!r} {may} to memory that is read before")


OBSTACLES: tuple[Callable[[Body], Iterator[Span]], ...] = (
    _uncrossable,
    _with_sparse_gradient,
    _transforms,
    _setters,
    _redescribed,
    _recomputed_after_write,
    _aliased_with_own_gradient,
    up_to_last_write,
)
"""All obstacles to a cut; where several apply, the one that begins first is reported, ties in this order."""
