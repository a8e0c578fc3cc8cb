"""Defects put back into ddpopt: writes that go unnoticed, and memory that is taken without a proof.

Each goes in at the one place that all ask: the table of what a node writes, or the call that receives a
gradient. So plan and proof are mistaken together, and only what is computed can show it; a drawn model does.
Invariant: nothing but the named kind of write, or of gradient, is treated otherwise.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from ddpopt.ddp.ready_hooks import ReadyHooks
from ddpopt.graph import effects
from ddpopt.graph.nodes import overlaps_itself
from ddpopt.inline import handover
from ddpopt.planning import cut_points
from ddpopt.proof import certificate, memory
from ddpopt.testing.drawn import DrawnModel, step
from tests.selftest.sites import Inject, Site


@dataclass(frozen=True)
class Defect:
    """A defect, and what shows it.

    Attributes:
        name: unique.
        inject: puts it in.
        shown_by: the smallest model that shows it.
        trace: what the source of a model has that may show it: a regular expression.
        mode: in which it shows.
        harmful_from: the first release of torch in which it does harm.
        harmless_from: the first release after that in which it does no harm.
    """

    name: str
    inject: Inject
    shown_by: DrawnModel
    trace: str
    mode: str = "ddpopt-split"
    harmful_from: str = "2.11"
    harmless_from: str = "3"

    @property
    def is_harmless(self) -> bool:
        return not self.harmful_from <= torch.__version__ < self.harmless_from


def forgetting(forgotten: Callable[[fx.Node], bool]) -> Inject:
    """Hide what some nodes write."""

    @contextlib.contextmanager
    def inject(site: Site) -> Iterator[None]:
        known = effects._mutated

        def forgetful(node: fx.Node) -> Iterator[fx.Node]:
            written = list(known(node))
            if written and forgotten(node):
                site.mark()
                return iter(())
            return iter(written)

        with patch.object(effects, "_mutated", forgetful):
            yield

    return inject


@contextlib.contextmanager
def taking(site: Site) -> Iterator[None]:
    """Take the memory of every gradient that would be copied."""
    receive = handover.Call.receive

    def take(self: handover.Call, slot: int, gradient: Tensor, treatment: int, gate: Any) -> None:
        if treatment == handover.COPIED:
            site.mark()
            treatment = handover.TAKEN
        receive(self, slot, gradient, treatment, gate)

    with patch.object(handover.Call, "receive", take), patch.object(handover, "is_alone", lambda _: True):
        yield


@contextlib.contextmanager
def unhooked(site: Site) -> Iterator[None]:
    """Hand over the gradients of parameters that users have hooked."""
    hooked = ReadyHooks.is_hooked
    own = handover._is_hooked

    def overlooked(was: bool) -> bool:
        if was:
            site.mark()
        return False

    with (
        patch.object(ReadyHooks, "is_hooked", lambda self, place: overlooked(hooked(self, place))),
        patch.object(handover, "_is_hooked", lambda parameter: overlooked(own(parameter))),
    ):
        yield


def _without(obstacle: Any, check: Any) -> Inject:
    """Hide an obstacle to cuts from planning, and skip the check for it in the proof."""

    @contextlib.contextmanager
    def inject(site: Site) -> Iterator[None]:
        def nothing(*of: Any) -> Iterator[cut_points.Span]:
            if any(obstacle(*of)):
                site.mark()
            return iter(())

        obstacles = tuple(nothing if find is obstacle else find for find in cut_points.OBSTACLES)
        invariants = tuple(row for row in certificate.INVARIANTS if row.check is not check)
        with (
            patch.object(cut_points, "OBSTACLES", obstacles),
            patch.object(cut_points, obstacle.__name__, nothing),
            patch.object(certificate, "INVARIANTS", invariants),
        ):
            yield

    return inject


def _answering_no(question: Callable[..., bool]) -> Inject:
    """Answer no to a question of planning and proof."""

    @contextlib.contextmanager
    def inject(site: Site) -> Iterator[None]:
        def no(*of: Any) -> bool:
            if question(*of):
                site.mark()
            return False

        name = question.__name__
        with patch.object(cut_points, name, no), patch.object(memory, name, no):
            yield

    return inject


class _AnyName:
    """Contains every name; marks the site where it matters."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.known = effects.FORGETTING_NAMES

    def __contains__(self, name: str) -> bool:
        if name not in self.known:
            self.site.mark()
        return True


@contextlib.contextmanager
def forgetting_writes(site: Site) -> Iterator[None]:
    """Assume that no write keeps what it overwrites for its backward, in planning and proof."""
    with patch.object(effects, "FORGETTING_NAMES", _AnyName(site)):
        yield


WRITTEN_APART = _without(cut_points.up_to_last_write, memory.writes_follow_reads_in_one_segment)
"""Cuts between a tensor's creation or a read of it and a later write are allowed, in planning and proof."""


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)


def _is_numpy(node: fx.Node) -> bool:
    return "numpy" in type(node.target).__name__


def _around_layers(block: str, **options: str) -> DrawnModel:
    steps = (_LINEAR, step(block, **options, body=(_LINEAR, _LINEAR)))
    return DrawnModel(steps=steps, width=4, cap_bytes=1)


def _written(block: str, by: str) -> DrawnModel:
    return DrawnModel(steps=(step(block, by=by),), width=4, cap_bytes=1)


def _forgets(what: str, forgotten: Callable[[fx.Node], bool], shown_by: DrawnModel, trace: str) -> Defect:
    name = f"it goes unnoticed what {what} write"
    return Defect(name, forgetting(forgotten), shown_by, trace)


def _takes(what: str, shown_by: DrawnModel, trace: str) -> Defect:
    return Defect(f"a gradient is taken that {what}", taking, shown_by, trace, "ddpopt-inline")


_LINEAR = step("linear")
DEFECTS: tuple[Defect, ...] = (
    _forgets(
        "methods that end in _",
        lambda node: node.op == "call_method" and _name(node).endswith("_") and "__" not in _name(node),
        _written("written", "add_"),
        r"t\d+\.(add|mul)_\(",
    ),
    _forgets(
        "methods of Python's operators",
        lambda node: node.op == "call_method" and _name(node).startswith("__"),
        _written("written", "imul"),
        r"__imul__",
    ),
    _forgets(
        "Python's operators",
        lambda node: not _is_numpy(node) and _name(node) in ("iadd", "setitem"),
        _written("written", "operator"),
        r"t\d+ \+= |t\d+\[.*\] = ",
    ),
    _forgets(
        "functions with out= or inplace=",
        lambda node: "out" in node.kwargs or bool(node.kwargs.get("inplace")),
        _written("written_by_function", "out"),
        r"out=t\d|inplace=True",
    ),
    _forgets("NumPy arrays", _is_numpy, _written("written", "numpy"), r"\.numpy\(\)"),
    _forgets(
        "norms",
        lambda node: "norm" in _name(node),
        _written("statistics", "native"),
        r"(batch|instance)_norm\(",
    ),
    _forgets(
        "lookups", lambda node: "embedding" in _name(node), _written("looked_up", "embedding"), r"max_norm="
    ),
    _forgets(
        "bodies",
        lambda node: isinstance(node.target, HigherOrderOperator),
        _written("written_inside", "function"),
        r"Writing\.apply|Marking\.apply|checkpoint\(inside",
    ),
    _forgets(
        "functions that Dynamo does not look into",
        lambda node: not effects.is_known(node),
        _written("written_inside", "allow_in_graph"),
        r"= (allowed|traced)\(",
    ),
    _forgets(
        "operators of the user",
        lambda node: isinstance(node.target, OpOverload) and node.target.namespace == "drawn",
        _written("written_inside", "operator"),
        r"shrink\(t",
    ),
    _takes("an input has, too", DrawnModel(steps=(step("added", to="input"), _LINEAR)), r"prompt\d"),
    _takes("eager code hands on", DrawnModel(steps=(step("from_outside"), _LINEAR)), r"outside\("),
    _takes("the user made", DrawnModel(steps=(step("returned"), _LINEAR)), r"Returned(Saved|Cloned)\.apply"),
    _takes(
        "comes from the user, who gives it again",
        DrawnModel(steps=(_LINEAR, step("added")), loss="given", training="accumulation", cap_bytes=1),
        r"(?s)self\.rows\d.*Given\.apply",
    ),
    Defect(
        "statistics are updated in one segment and read in another",
        WRITTEN_APART,
        DrawnModel(steps=(_LINEAR, step("statistics", read="saved")), width=4, cap_bytes=1),
        r"s\d+ = torch\.tanh",
    ),
    Defect(
        "a tensor that a checkpointed region saves is written to in another segment",
        WRITTEN_APART,
        _written("kept_and_written", "checkpoints"),
        r"clamp_\(max=1\.0\)",
    ),
    Defect(
        "a view with a gradient of its own crosses a cut",
        _without(cut_points._aliased_with_own_gradient, memory.gradients_of_their_own_stay),
        _around_layers("turned", by="function"),
        r"Turned\.apply|register_hook\(torch\.neg\)",
    ),
    Defect(
        "a view that overlaps itself crosses a cut",
        _answering_no(overlaps_itself),
        _around_layers("read_late", of="windows"),
        r"unfold\(1, 2, 1\)",
        harmful_from="2.12",  # then AOTAutograd gives the gradient the strides of the view
    ),
    Defect(
        "a value that gets no gradient crosses a cut",
        _without(cut_points._without_backward, memory.values_that_cross_get_their_gradient),
        _around_layers("read_late", of="roots"),
        r"\* 0\)\.sqrt\(\)",
    ),
    Defect(
        "a detached value with its own gradient is taken again in another segment",
        _answering_no(effects.is_detached_view),
        _around_layers("built", by="detached"),
        r"\* 0\.5\)\.detach\(\)",
    ),
    Defect(
        "what a write keeps for its backward is written to in another segment",
        forgetting_writes,
        _around_layers("built", by="product"),
        r"b\d+ \*= late",
        harmless_from="2.15",
    ),
    Defect(
        "a hook is not waited for",
        unhooked,
        DrawnModel(steps=(step("hooked"), _LINEAR)),
        r"hook_(changed|node|accumulated)\(self",
        "ddpopt-inline",
    ),
)
