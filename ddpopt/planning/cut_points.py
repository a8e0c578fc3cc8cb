"""Where a graph may be cut: between which nodes nothing passes that a cut would harm.

A cut hands values from one compiled piece to the next. Tensors, numbers and tuples of them pass; a
stream, a functorch level or two views of a tensor that is mutated later do not.

Invariant: a position that is not blocked can be cut without changing what the program computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._prims_common import is_contiguous_or_false, is_non_overlapping_and_dense_or_false
from torch.utils import _pytree as pytree

from ddpopt.graph.aliases import first_names, is_view, reads_value, viewed_input
from ddpopt.graph.effects import is_known, mutated_inputs, reads_memory, redescribes, updates_statistics
from ddpopt.graph.nodes import SOURCES, example_value, requires_grad, storages
from ddpopt.graph.state import AUTOCAST, GRAD_MODE

CROSSABLE = (
    torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format, slice,
)  # fmt: skip


HOOK_SWITCHES = HOOKS_OFF, HOOKS_ON = (
    torch._C._autograd._saved_tensors_hooks_disable,
    torch._C._autograd._saved_tensors_hooks_enable,
)


@dataclass(frozen=True)
class Span:
    """Cut positions `first` to `last` (inclusive) that are not possible, and why."""

    first: int
    last: int
    why: str


def blocked_positions(
    graph: fx.Graph, body: Sequence[fx.Node], others: Iterable[Span] = ()
) -> tuple[str | None, ...]:
    """For each body position, why no cut may lie right before it, or None; `others` are known already."""
    position = {node: index for index, node in enumerate(body)}
    spans = [
        *others,
        *_uncrossable_spans(body, position),
        *_hookless_spans(body),
        *_setter_spans(body),
        *_nesting_spans(body),
        *_redescribed_spans(graph, body, position),
        *_scalar_spans(body, position),
        *_view_spans(body, position),
        *_alias_spans(graph, position, len(body)),
        *_copy_spans(graph, position),
        *_kept_spans(graph, position),
    ]
    blocked: list[str | None] = [None] * len(body)
    filled = 0
    for span in sorted(spans, key=lambda s: s.first):
        for index in range(max(filled, span.first), min(span.last + 1, len(body))):
            blocked[index] = span.why
        filled = max(filled, span.last + 1)
    return tuple(blocked)


def _uncrossable_spans(body: Sequence[fx.Node], position: Mapping[fx.Node, int]) -> Iterator[Span]:
    """From a node whose value cannot be handed over (a stream, a generator) to its last reader."""
    for index, node in enumerate(body):
        if not node.users or node.target in AUTOCAST or _crossable(example_value(node)):
            continue
        last = max(position.get(user, len(body)) for user in node.users)
        yield Span(index + 1, last, f"{node.name!r} returns a value that cannot cross a cut")


def _crossable(value: object) -> bool:
    leaves = pytree.tree_leaves(value)
    return all(isinstance(leaf, CROSSABLE) and not any(is_so(leaf) for is_so in _HELD) for leaf in leaves)


def _is_reinterpreted(value: object) -> bool:
    """Whether a tensor is a view of real numbers as another dtype, of which torch makes no fake copy."""
    base = value._base if isinstance(value, torch.Tensor) else None
    return base is not None and base.dtype != value.dtype and not base.is_complex()  # type: ignore[attr-defined]


def _is_lazy(value: object) -> bool:
    """Whether a tensor is yet to be conjugated or negated: AOTAutograd takes its gradient to be so too."""
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def _is_nested(value: object) -> bool:
    """Whether a tensor is nested, or a view of one that is: torch makes no fake copy of such a view."""
    base = value._base if isinstance(value, torch.Tensor) else None
    return isinstance(value, torch.Tensor) and (value.is_nested or (base is not None and base.is_nested))


_HELD = (_is_reinterpreted, _is_lazy, _is_nested)


def _setter_spans(body: Sequence[fx.Node]) -> Iterator[Span]:
    """Between two calls that set the same global state (sdpa kernels, deterministic mode, …).

    What has separate spans is left out, and what a functorch transform sets and resets within itself.
    """
    first: dict[object, int] = {}
    depth = 0
    for index, node in enumerate(body):
        depth += (change := _nesting(node))
        sets_state = node.op == "call_function" and not node.users and not node.all_input_nodes
        spanned = node.target in (GRAD_MODE, *AUTOCAST, *HOOK_SWITCHES) or change or depth > 0
        if not sets_state or spanned or mutated_inputs(node):
            continue
        if node.target in first:
            yield Span(first[node.target] + 1, index, f"{node.name!r} undoes global state set before")
        else:
            first[node.target] = index


def _nesting_spans(body: Sequence[fx.Node]) -> Iterator[Span]:
    """Inside a functorch level (``torch.func.grad``, ``vmap``), which lives within one trace."""
    depth, opened = 0, 0
    for index, node in enumerate(body):
        if (change := _nesting(node)) == 0:
            continue
        opened = index if depth == 0 else opened
        depth += change
        if depth == 0:
            yield Span(opened + 1, index, "inside a functorch transform")


def _nesting(node: fx.Node) -> int:
    """By how much a node changes the depth of functorch's levels."""
    name = getattr(node.target, "__name__", str(node.target))
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def _hookless_spans(body: Sequence[fx.Node]) -> Iterator[Span]:
    """Where hooks on saved tensors are forbidden, as inside ``torch.func.grad``.

    The switch is the thread's, so a segment that left it off would forbid hooks to what is traced next.
    Nested spans turn it off again, with the message of the outer one; the outermost one turns it on.
    """
    opened: int | None = None
    for index, node in enumerate(body):
        if node.target is HOOKS_OFF and opened is None:
            opened = index
        elif node.target is HOOKS_ON and opened is not None:
            yield Span(opened + 1, index, "hooks on saved tensors are forbidden here")
            opened = None


def _redescribed_spans(
    graph: fx.Graph, body: Sequence[fx.Node], position: Mapping[fx.Node, int]
) -> Iterator[Span]:
    """From a value that is reshaped or detached in place to the last reader of its storage, by any view.

    The example that tracing left is of after the change: neither the value before it nor a view of that can
    be described to another segment.
    """
    redescribed = {key: node for node in body if redescribes(node) for key in storages(node)}
    if not redescribed:
        return
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for node in graph.nodes:
        for key in (key for key in storages(node) if key in redescribed):
            first.setdefault(key, position.get(node, -1))
            last[key] = max(last.get(key, -1), _last_use(node, position))
    for key, node in redescribed.items():
        yield Span(first[key] + 1, last[key], f"{node.name!r} changes what a tensor is in place")


def _scalar_spans(body: Sequence[fx.Node], position: Mapping[fx.Node, int]) -> Iterator[Span]:
    """From a symbolic float or bool that is read off a tensor which is written to, to its last reader.

    A segment that reads such a number computes it again, from what the tensor holds by then.
    """
    scalars = [n for n in body if isinstance(example_value(n), (torch.SymFloat, torch.SymBool))]
    if not scalars:
        return
    written = _written(body)
    last: dict[fx.Node, int] = {}
    for node in reversed(scalars):
        last[node] = max([_last_use(node, position), *(last[u] for u in node.users if u in last)])
        if any(not written.keys().isdisjoint(storages(source)) for source in node.all_input_nodes):
            why = f"{node.name!r} is read off a tensor that is written to"
            yield Span(position[node] + 1, last[node], why)


def _view_spans(body: Sequence[fx.Node], position: Mapping[fx.Node, int]) -> Iterator[Span]:
    """From a view that another tensor tells the place of, which is written to, to its last reader.

    A segment that reads a view may take it again, and would take it where that tensor says by then.
    """
    written = _written(body)
    for node in body if written else ():
        own = set(storages(node))
        others = {key for source in node.all_input_nodes for key in storages(source)} - own
        if own and not written.keys().isdisjoint(others) and is_view(node):
            why = f"{node.name!r} is a view by a tensor that is written to"
            yield Span(position[node] + 1, _last_view_use(node, position), why)


def _last_view_use(node: fx.Node, position: Mapping[fx.Node, int]) -> int:
    """Position of the last reader of a view, by whatever view of it."""
    pending, last = [node], -1
    seen = dict.fromkeys(pending)
    for view in pending:
        last = max(last, _last_use(view, position))
        further = [user for user in view.users if user not in seen and is_view(user)]
        seen.update(dict.fromkeys(further))
        pending += further
    return last


def _copy_spans(graph: fx.Graph, position: Mapping[fx.Node, int]) -> Iterator[Span]:
    """From the first reader of a tensor that a copy cannot take the place of, to the last write to it.

    A segment that reads what a later one writes to gets a copy, whose memory layout may differ. And autograd
    does not see running statistics change: the backward of what reads them reads what they hold by then.
    """
    mutated = _written(position)
    uncopied = _uncopied(graph, mutated) if mutated else {}
    updating = [node for node in position if updates_statistics(node)] if mutated else []
    unseen = {key for node in updating for source in mutated_inputs(node) for key in storages(source)}
    for node, index in position.items() if uncopied or unseen else ():
        kept = unseen if requires_grad(example_value(node)) else ()
        read = {key for source in node.all_input_nodes for key in storages(source)}
        for key in (key for key in read if key in uncopied or key in kept):
            if index < mutated[key] and reads_value(node, key):
                why = f"what {node.name!r} reads is written to later, and no copy could take its place here"
                yield Span(index + 1, mutated[key], why)


def _kept_spans(graph: fx.Graph, position: Mapping[fx.Node, int]) -> Iterator[Span]:
    """From the making of a tensor that is read and later written to, to the last write.

    A segment that is given a tensor, reads it and then writes to it may keep it for its backward, which then
    reads what was written: torch 2.13 takes a graph's inputs for values that do not change.
    """
    mutated = _written(position)
    given = {key for node in graph.nodes if node.op in SOURCES for key in storages(node)}
    made: dict[int, int] = {}
    for node, index in position.items() if mutated else ():
        for key in (key for key in storages(node) if key in mutated and key not in given):
            made.setdefault(key, index)
        read = {key for source in node.all_input_nodes for key in storages(source)}
        for key in (key for key in read if key in made and index < mutated[key]):
            if reads_value(node, key):
                yield Span(made[key] + 1, mutated[key], f"{node.name!r} reads what is written to later")


def _uncopied(graph: fx.Graph, mutated: Container[int]) -> dict[int, fx.Node]:
    """The storages whose place is looked at, or that hold tensors that are no views of one another."""
    shown = {
        key for node in graph.nodes if reads_memory(node) for s in node.all_input_nodes for key in storages(s)
    }
    made: dict[int, fx.Node] = {}
    found: dict[int, fx.Node] = {}
    for node in (node for node in graph.nodes if node.op not in ("get_attr", "output")):
        own = [key for key in storages(node) if key in mutated]
        if not own or viewed_input(node) is not None:
            continue
        written = {key for source in mutated_inputs(node) for key in storages(source)}
        alike = _is_copied_alike(example_value(node))
        for key in (key for key in own if key not in written):
            if key in shown or key in made or not alike:
                found.setdefault(key, node)
            made[key] = node
    return found


def _is_copied_alike(value: object) -> bool:
    """Whether a clone of each tensor in a value has the strides that the tensor has."""
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return all(is_contiguous_or_false(t) or is_non_overlapping_and_dense_or_false(t) for t in tensors)


def _written(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """For each storage that is written to: the place among `nodes` of the last one that does."""
    return {
        key: index
        for index, node in enumerate(nodes)
        for source in mutated_inputs(node)
        for key in storages(source)
    }


def _last_use(node: fx.Node, position: Mapping[fx.Node, int]) -> int:
    """Position of the last reader of a node; after the last node if the graph returns it."""
    return max((position.get(user, len(position)) for user in node.users), default=-1)


def _alias_spans(graph: fx.Graph, position: Mapping[fx.Node, int], end: int) -> Iterator[Span]:
    """Where two live names of one storage would cross a cut before that storage is mutated.

    A single mutated value crosses well: the later segment mutates its input, and views are taken again from
    it. Two values that are one tensor (``y = x.add_(1)``, both read later) would arrive as strangers.
    """
    mutated: dict[int, int] = {}
    whys: dict[int, str] = {}
    for node, index in position.items():
        for key in (key for value in mutated_inputs(node) for key in storages(value)):
            mutated[key] = index
            verb = "writes to" if is_known(node) else "may write to"
            whys[key] = f"two names of one tensor that {node.name!r} {verb}"
    if not mutated:
        return
    first = first_names(graph.nodes)
    roots: dict[fx.Node, fx.Node] = {}
    lives: dict[int, dict[fx.Node, int]] = {key: {} for key in mutated}
    for node in graph.nodes:
        for key in (key for key in storages(node) if key in mutated):
            if node.op == "placeholder" and requires_grad(example_value(node)):
                yield Span(0, mutated[key], f"{node.name!r} requires grad and is itself mutated")
            last = _last_use(node, position)
            base = viewed_input(first.get(node, node))
            if base is not None and last == end:  # the caller sees what is written to a view that it gets
                yield Span(position[node] + 1, mutated[key], whys[key])
            elif node.op == "placeholder":
                last = end  # and what is written to an input
            roots[node] = root = node if base is None else roots.get(base, base)
            lives[key][root] = max(lives[key].get(root, -1), last)
    for key, live in lives.items():
        spans = [(position.get(root, -1), last) for root, last in live.items() if last >= 0]
        yield from _overlaps(spans, mutated[key], whys[key])


def _overlaps(live: Sequence[tuple[int, int]], last_mutation: int, why: str) -> Iterator[Span]:
    """Cut positions, up to the last mutation, that two or more of the (defined, last read) pairs span."""
    events = sorted([(first + 1, 1) for first, _ in live] + [(last + 1, -1) for _, last in live])
    count = 0
    for (at, step), (until, _) in itertools.pairwise(events):
        count += step
        if count > 1 and at <= last_mutation:
            yield Span(at, min(until - 1, last_mutation), why)
