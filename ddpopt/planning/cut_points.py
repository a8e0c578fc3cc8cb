"""Where a graph may be cut: between which nodes nothing passes that a cut would harm.

A cut hands values from one compiled piece to the next. Tensors, numbers and tuples of them pass; a
stream, a functorch level or two views of a tensor that is mutated later do not.

Invariant: a position that is not blocked can be cut without changing what the program computes.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._prims_common import is_contiguous_or_false, is_non_overlapping_and_dense_or_false
from torch.utils import _pytree as pytree

from ddpopt.graph.aliases import first_names, is_view, reads_value, viewed_input
from ddpopt.graph.effects import (
    is_known,
    mutated_inputs,
    reads_memory,
    redescribes,
    writes_unseen,
    written_storages,
)
from ddpopt.graph.nodes import (
    body_nodes,
    example_value,
    is_uncrossable_number,
    read_storages,
    requires_grad,
    storages,
)
from ddpopt.graph.state import AUTOCAST, GRAD_MODE

CROSSABLE = (
    torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format, slice,
)  # fmt: skip
HOOKS_OFF = torch._C._autograd._saved_tensors_hooks_disable
HOOKS_ON = torch._C._autograd._saved_tensors_hooks_enable


@dataclass(frozen=True)
class Span:
    """Cut positions `first` to `last` (inclusive) that are not possible, and why."""

    first: int
    last: int
    why: str


class Body:
    """The body of a graph: the place of each node, and of the last write to each storage."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes = body_nodes(graph)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.written = {key: index for index, node in enumerate(self.nodes) for key in written_storages(node)}

    @cached_property
    def made(self) -> dict[int, int]:
        """For each storage, the place of the first node that has it; -1 if it is given to the graph."""
        nodes = reversed(self.graph.nodes)
        return {key: self.position.get(node, -1) for node in nodes for key in storages(node)}

    def last_use(self, node: fx.Node) -> int:
        """Position of the last reader of a node; after the last node if the graph returns it."""
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


def blocked_positions(graph: fx.Graph, others: Iterable[Span] = ()) -> tuple[str | None, ...]:
    """For each body position, why no cut may lie right before it, or None; `others` are known already."""
    body = Body(graph)
    return body.blocked([*others, *itertools.chain.from_iterable(find(body) for find in OBSTACLES)])


# --- values and global state -------------------------------------------------------------------------


def _uncrossable(body: Body) -> Iterator[Span]:
    """From a node whose value cannot be handed over (a stream, a generator) to its last reader."""
    for index, node in enumerate(body.nodes):
        if node.users and node.target not in AUTOCAST and not _crossable(example_value(node)):
            why = f"{node.name!r} returns a value that cannot cross a cut"
            yield Span(index + 1, body.last_use(node), why)


def _crossable(value: object) -> bool:
    leaves = pytree.tree_leaves(value)
    return all(isinstance(leaf, CROSSABLE) and not _is_held(leaf) for leaf in leaves)


def _is_held(value: object) -> bool:
    """Whether a tensor is one that AOTAutograd takes for another, or cannot take.

    Of one that is yet to be conjugated or negated it takes the gradient to be so, too. Of a nested tensor's
    view, and of real numbers as another dtype, torch makes no fake copy.
    """
    if not isinstance(value, torch.Tensor):
        return False
    base: torch.Tensor | None = value._base
    if base is not None and (base.is_nested or (base.dtype != value.dtype and not base.is_complex())):
        return True
    return value.is_conj() or value.is_neg() or value.is_nested


def _transforms(body: Body) -> Iterator[Span]:
    """Inside a functorch level (``torch.func.grad``, ``vmap``), which lives within one trace.

    And where hooks on saved tensors are forbidden, as inside ``torch.func.grad``. The switch is the
    thread's, so a segment that left it off would forbid hooks to what is traced next. Nested spans turn it
    off again, with the message of the outer one; the outermost one turns it on.
    """

    def forbids(before: bool, node: fx.Node) -> bool:
        return node.target is HOOKS_OFF or (before and node.target is not HOOKS_ON)

    forbidden = itertools.accumulate(body.nodes, forbids, initial=False)
    levels = itertools.accumulate(map(_nesting, body.nodes), initial=0)
    why = ""  # of what began first
    for position, (hookless, depth) in enumerate(zip(forbidden, levels, strict=True)):
        if hookless or depth:
            here = "hooks on saved tensors are forbidden here" if hookless else "inside a functorch transform"
            why = why or here
            yield Span(position, position, why)
        else:
            why = ""


def _nesting(node: fx.Node) -> int:
    """By how much a node changes the depth of functorch's levels."""
    name = getattr(node.target, "__name__", str(node.target))
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def _setters(body: Body) -> Iterator[Span]:
    """Between two calls that set the same global state (sdpa kernels, deterministic mode, …).

    What has separate spans is left out, and what a functorch transform sets and resets within itself.
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
            yield Span(first[node.target] + 1, index, f"{node.name!r} undoes global state set before")
        else:
            first[node.target] = index


# --- what is written to ------------------------------------------------------------------------------


def _redescribed(body: Body) -> Iterator[Span]:
    """From a value that is reshaped or detached in place to the last reader of its storage, by any view.

    The example that tracing left is of after the change: neither the value before it nor a view of that can
    be described to another segment.
    """
    redescribed = {key: node for node in body.nodes if redescribes(node) for key in storages(node)}
    last: dict[int, int] = {}
    for node in body.graph.nodes if redescribed else ():
        for key in storages(node):
            last[key] = max(last.get(key, -1), body.last_use(node))
    for key, node in redescribed.items():
        yield Span(body.made[key] + 1, last[key], f"{node.name!r} changes what a tensor is in place")


def _taken_again(body: Body) -> Iterator[Span]:
    """From what a segment that reads it takes again, by a tensor that is written to, to its last reader.

    That is a symbolic float or bool that is read off the tensor, or a view whose place the tensor tells. The
    segment would take it by what that tensor holds by then.
    """
    for node in body.nodes if body.written else ():
        told_by = read_storages(node).keys() - storages(node)
        if told_by.isdisjoint(body.written):
            continue
        for is_taken, how in ((is_uncrossable_number, "read off"), (is_view, "a view by")):
            if is_taken(node):
                last = max(map(body.last_use, _with_users(node, is_taken)))
                why = f"{node.name!r} is {how} a tensor that is written to"
                yield Span(body.position[node] + 1, last, why)


def _with_users(node: fx.Node, of_kind: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """A node, and what of one kind is made of it, and of that in turn."""
    found = dict.fromkeys([node])
    pending = [node]
    for maker in pending:
        further = [user for user in maker.users if user not in found and of_kind(user)]
        found.update(dict.fromkeys(further))
        pending += further
    return pending


def _shown_otherwise(body: Body) -> Iterator[Span]:
    """From what shows another value's memory, but is more or less than a view of it, to its last reader.

    A compiled segment hands out no view: it is made again outside, from the value that it shows. The gradient
    of a custom function would be lost, and so would a hook, which is for all readers of the value, those
    before it too. To autograd the results of ``unsafe_split`` and its like are values of their own: what is
    written to one is not written to the other.
    """
    for index, node in enumerate(body.nodes):
        name = getattr(node.target, "__name__", str(node.target))
        apart = isinstance(node.target, HigherOrderOperator) or not is_known(node)
        read = read_storages(node)
        own = {key for key, times in Counter(storages(node)).items() if times > 1 or key in read}
        unsafe = name.lstrip("_").startswith("unsafe_") and not own.isdisjoint(body.written)
        if not own or not (unsafe or (apart and requires_grad(example_value(node)))):
            continue
        names = _with_users(node, lambda user, own=own: not own.isdisjoint(storages(user)))  # type: ignore[misc]  # bound now
        last = max(map(body.last_use, names))
        whole = unsafe or name == "register_hook" or last == len(body.nodes)
        first = min(body.made[key] for key in own) if whole else index
        yield Span(first + 1, last, f"{node.name!r} shows another value, and is no plain view of it")


def _aliases(body: Body) -> Iterator[Span]:
    """Where two live names of one storage would cross a cut before that storage is mutated.

    A single mutated value crosses well: the later segment mutates its input, and views are taken again from
    it. Two values that are one tensor (``y = x.add_(1)``, both read later) would arrive as strangers.
    """
    if not body.written:
        return
    end, position = len(body.nodes), body.position
    first = first_names(body.graph.nodes)
    roots: dict[fx.Node, fx.Node] = {}
    lives: dict[int, dict[fx.Node, int]] = {key: {} for key in body.written}
    for node in body.graph.nodes:
        for key in (key for key in storages(node) if key in body.written):
            if node.op == "placeholder" and requires_grad(example_value(node)):
                why = f"{node.name!r} requires grad and is itself mutated"
                yield Span(0, body.written[key], why)
            last = body.last_use(node)
            base = viewed_input(first.get(node, node))
            if base is not None and last == end:  # the caller sees what is written to a view that it gets
                yield Span(position[node] + 1, body.written[key], _two_names(body, key))
            elif node.op == "placeholder":
                last = end  # and what is written to an input
            roots[node] = root = node if base is None else roots.get(base, base)
            lives[key][root] = max(lives[key].get(root, -1), last)
    for key, live in lives.items():
        spans = [(position.get(root, -1), last) for root, last in live.items() if last >= 0]
        yield from _overlaps(spans, body.written[key], _two_names(body, key))


def _two_names(body: Body, key: int) -> str:
    writer = body.nodes[body.written[key]]
    return f"two names of one tensor that {writer.name!r} {'writes' if is_known(writer) else 'may write'} to"


def _overlaps(live: Sequence[tuple[int, int]], last_mutation: int, why: str) -> Iterator[Span]:
    """Cut positions, up to the last mutation, that two or more of the (defined, last read) pairs span."""
    events = sorted([(first + 1, 1) for first, _ in live] + [(last + 1, -1) for _, last in live])
    count = 0
    for (at, step), (until, _) in itertools.pairwise(events):
        count += step
        if count > 1 and at <= last_mutation:
            yield Span(at, min(until - 1, last_mutation), why)


def _read_before_a_write(body: Body) -> Iterator[Span]:
    """To the last write to a tensor that is read before: from its making, or from that reader.

    From its making, for a segment that is given a tensor, reads it and then writes to it may keep it for its
    backward, which then reads what was written: torch 2.13 takes a graph's inputs for values that do not
    change. Of what the graph is given, from a reader to which no copy can be handed: a copy's memory layout
    may differ. And autograd does not see running statistics change, nor what NumPy writes: the backward of
    what reads them reads what they hold by then. A region that is computed again in backward (a checkpoint)
    keeps what it is given, written to or not.
    """
    if not body.written:
        return
    uncopied = _uncopied(body.graph, body.written)
    unseen = {key for node in body.nodes if writes_unseen(node) for key in written_storages(node)}
    for index, node in enumerate(body.nodes):
        late = [key for key in read_storages(node) if index < body.written.get(key, -1)]
        kept = written_storages(node) if isinstance(node.target, HigherOrderOperator) else ()
        for key in (key for key in late if key in kept):
            why = f"{node.name!r} keeps what it writes to, which is written to later"
            yield Span(index + 1, body.written[key], why)
        for key in (key for key in late if reads_value(node, key)):
            if key in uncopied or (key in unseen and requires_grad(example_value(node))):
                why = f"what {node.name!r} reads is written to later, and no copy could take its place here"
                yield Span(index + 1, body.written[key], why)
            if body.made[key] >= 0:
                why = f"{node.name!r} reads what is written to later"
                yield Span(body.made[key] + 1, body.written[key], why)


def _uncopied(graph: fx.Graph, mutated: Container[int]) -> set[int]:
    """The storages whose place is looked at, or that hold tensors that are no views of one another."""
    shown = {key for node in graph.nodes if reads_memory(node) for key in read_storages(node)}
    made: set[int] = set()
    found: set[int] = set()
    for node in (node for node in graph.nodes if node.op not in ("get_attr", "output")):
        own = [key for key in storages(node) if key in mutated]
        if not own or viewed_input(node) is not None:
            continue
        written = written_storages(node)
        alike = _is_copied_alike(example_value(node))
        for key in (key for key in own if key not in written):
            if key in shown or key in made or not alike:
                found.add(key)
            made.add(key)
    return found


def _is_copied_alike(value: object) -> bool:
    """Whether a clone of each tensor in a value has the strides that the tensor has."""
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return all(is_contiguous_or_false(t) or is_non_overlapping_and_dense_or_false(t) for t in tensors)


OBSTACLES: tuple[Callable[[Body], Iterator[Span]], ...] = (
    _uncrossable,
    _transforms,
    _setters,
    _redescribed,
    _taken_again,
    _shown_otherwise,
    _aliases,
    _read_before_a_write,
)
"""All that keeps a graph from being cut; where several do, the first of these that begins first is told."""
