"""Draw models: which blocks may go where, and in what order draws shrink.

Invariant: nothing is drawn and thrown away. Draws shrink toward fewer steps, toward steps without a body,
toward blocks that were registered first, and toward the first choice of each option.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from hypothesis import event
from hypothesis import strategies as st

from ddpopt.errors import UsageError
from ddpopt.testing.drawn import BLOCKS, Block, DrawnModel, Step, known_features, step
from ddpopt.testing.drawn.forms import CHOICES, PLAIN

Features = frozenset[str]

_DEPTH = 2
_BODY_STEPS = 3
_CHOICES = 100
"""The most choices at once: among larger numbers Hypothesis prefers constants found in loaded modules."""
_READS = st.sampled_from((0, 0, 0, 0, 1, 1, 2, 3, 5))


@st.composite
def models(draw: st.DrawFn, *, without: Iterable[str] = (), max_steps: int = 8) -> DrawnModel:
    """Draw a small model with its inputs and its loss.

    It runs forward and backward with finite results, and repeats bit for bit. Each feature that it has is
    reported as a Hypothesis event. See ``docs/generators.md``.

    Args:
        draw: given by Hypothesis.
        without: features that may not occur, as named by :func:`ddpopt.testing.drawn.known_features`.
        max_steps: the largest number of steps, not counting those in bodies.

    Returns:
        The model as a value. Its ``source`` is a Python module, its ``case()`` is ready to verify.

    Raises:
        UsageError: if there is no feature of that name.
    """
    model = draw(_models(_allowed(without), max_steps))
    for feature in sorted(model.features):
        event(feature)
    return model


def _allowed(without: Iterable[str]) -> Features:
    known = known_features()
    refused = frozenset(without)
    if unknown := sorted(refused - known):
        raise UsageError(
            f"expected names of features, got {', '.join(map(repr, unknown))}; the features are: "
            f"{', '.join(sorted(known))}"
        )
    return known - refused


@lru_cache
def _models(allowed: Features, max_steps: int) -> st.SearchStrategy[DrawnModel]:
    outputs = _steps(_Place(allowed, "output"))
    batches = [(2,), (3,), (2, 3)] if "dynamic-batch" in allowed else [(2,), (3,)]
    return st.builds(
        DrawnModel,
        steps=_lists(_steps(_Place(allowed)), max_steps),
        outputs=_lists(outputs, 3) if "several-outputs" in allowed else st.just(()),
        width=st.sampled_from((8, 4, 16)),
        batches=st.sampled_from(batches),
        cap_bytes=st.sampled_from((256, 1, 256, 1, 1024, 4096)),
        joined=st.just(True) if "unused-parameter" not in allowed else st.sampled_from((True, True, False)),
        seed=st.integers(0, 7),
        **{name: _forms(choices, allowed) for name, choices in CHOICES.items()},
    )


def _forms(choices: Mapping[str, str | None], allowed: Features) -> st.SearchStrategy[str]:
    names = [name for name, brings in choices.items() if brings is None or brings in allowed]
    return st.sampled_from([*names[:1] * (PLAIN - 1), *names])


def _lists(steps: st.SearchStrategy[Step], max_size: int) -> st.SearchStrategy[tuple[Step, ...]]:
    return st.lists(steps, max_size=max_size).map(tuple)


@dataclass(frozen=True)
class _Place:
    """Where a step may go.

    Attributes:
        allowed: the features that it may add.
        kind: ``"step"`` or ``"output"``.
        depth: how many levels of bodies may follow.
        pure: whether it may run twice.
        unbroken: whether Dynamo must not end its graph here.
    """

    allowed: Features
    kind: str = "step"
    depth: int = _DEPTH
    pure: bool = False
    unbroken: bool = False

    def admits(self, block: Block) -> bool:
        fits = block.place == self.kind and (self.depth > 0 or not block.body)
        kept = (block.pure or not self.pure) and not (block.breaks and self.unbroken)
        return fits and kept and block.within(self.allowed) is not None

    def inside(self, block: Block) -> "_Place":
        """Where the steps of a block's body may go."""
        return replace(
            self,
            depth=self.depth - 1,
            pure=self.pure or block.body == "pure",
            unbroken=self.unbroken or block.body == "unbroken",
        )


@lru_cache
def _steps(place: _Place) -> st.SearchStrategy[Step]:
    blocks = [block for block in BLOCKS.values() if place.admits(block)]
    steps = [_step(block, place) for block in blocks for _ in range(block.rate)]
    count = -(-len(steps) // _CHOICES)
    rows = [steps[first::count] for first in range(count)]
    return st.one_of(steps) if count <= 1 else st.sampled_from(rows).flatmap(st.one_of)


def _step(block: Block, place: _Place) -> st.SearchStrategy[Step]:
    choices = block.within(place.allowed) or {}
    simplest = {name: next(iter(values)) for name, values in block.options.items()}
    options = {n: st.sampled_from(values) for n, values in choices.items() if values != (simplest[n],)}
    if block.body:
        options["body"] = _lists(_steps(place.inside(block)), _BODY_STEPS)
    return st.builds(partial(step, block.name), *(_READS for _ in block.takes), **options)
