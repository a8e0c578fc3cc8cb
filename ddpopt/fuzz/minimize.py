"""Minimize a failure.

First the setting is simplified: the fewest steps and ranks that show the failure, and a simpler backend, so
that later tries cost less. Then the model is reduced by one change after another, whole steps first. A model
that fails in a different way is not a smaller version of the failure, and is rejected.

Any value is a valid model, so nothing here needs to know what a step does. Each candidate is strictly smaller
by `weight`, so the search terminates. Invariant: the result was seen to fail in the same way as the input.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddpopt.errors import NotJudgedError
from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.questions import Answer
from ddpopt.testing.drawn import BLOCKS, DrawnModel, Step, step
from ddpopt.testing.drawn.forms import CHOICES

TRIES = 400
BACKENDS = ("eager", "aot_eager")
"""Simplest first."""
Ask = Callable[[FoundCase], Answer]
Steps = tuple[Step, ...]

_PLAIN = DrawnModel()
_CHOSEN = (*CHOICES, "joined", "seed")
"""Fields with a plain value."""
_CAPS = (2**20, 1)
"""One bucket for all parameters, or one for each: caps in between are harder to understand."""
_PLAINER: Mapping[str, tuple[Any, ...]] = {
    **{name: (getattr(_PLAIN, name),) for name in _CHOSEN},
    "batches": ((2,), (2, 3)),
    "width": (4, 8),
    "cap_bytes": _CAPS,
}
"""For each field the values to try, simplest first."""


@dataclass(frozen=True)
class Minimized:
    """The state or the result of a search.

    Attributes:
        case: the smallest case found that fails in the same way.
        given: the original case.
        tries: the number of models tried.
        ended: whether no smaller model fails in this way; otherwise the search is running, or ran out of
            tries or time.
    """

    case: FoundCase
    given: FoundCase
    tries: int = 0
    ended: bool = False


def minimized(
    case: FoundCase,
    ask: Ask,
    *,
    tries: int = TRIES,
    seconds: float | None = None,
    tell: Callable[[Minimized], None] = lambda _: None,
) -> Minimized:
    """Search for a small model that fails in the same way.

    Args:
        case: the failure.
        ask: returns the answer to a case.
        tries: the number of models that may be tried.
        seconds: how long it may take; None for no limit.
        tell: called after each model.

    Returns:
        The result, with the smallest case found.

    Raises:
        NotJudgedError: the case does not fail as recorded.
    """
    end = None if seconds is None else time.monotonic() + seconds
    search = _Search(Minimized(case, case), ask, tries, end, tell)
    first = ask(case)
    if not case.fails_so(first):
        raise NotJudgedError(
            f"expected a case that fails as recorded: {case.signature}; here the result is: {first}. It was "
            f"found with torch {case.torch or '(release not recorded)'}"
        )
    search.run()
    return replace(search.found, ended=search.may_ask())


@dataclass
class _Search:
    """The search for a smaller form of one failure."""

    found: Minimized
    ask: Ask
    tries: int
    end: float | None
    tell: Callable[[Minimized], None]
    known: dict[FoundCase, bool] = field(default_factory=dict)

    def run(self) -> None:
        """Make the case smaller until nothing helps."""
        self._plainer_setting()
        while self._smaller_model():
            pass
        self._plainer_setting()

    def may_ask(self) -> bool:
        """Whether tries and time are left."""
        late = self.end is not None and time.monotonic() > self.end
        return self.found.tries < self.tries and not late

    def _plainer_setting(self) -> None:
        """Try fewer ranks and steps, and simpler backends."""
        setting = self.found.case.setting
        known = setting.backend in BACKENDS
        plainer: dict[str, Sequence[Any]] = {
            "nproc": range(1, setting.nproc),
            "steps": range(1, setting.steps),
            "backend": BACKENDS[: BACKENDS.index(setting.backend)] if known else BACKENDS,
        }
        for name, values in plainer.items():
            for value in values:
                setting = replace(self.found.case.setting, **{name: value})
                if self._shows(replace(self.found.case, setting=setting)):
                    break

    def _smaller_model(self) -> bool:
        """Apply each change that keeps the failure; the next try starts where the last change was made."""
        place = 0
        before = self.found.case
        candidates = list(smaller(before.model))
        while place < len(candidates):
            if self._shows(replace(self.found.case, model=candidates[place])):
                candidates = list(smaller(self.found.case.model))
            else:
                place += 1
        return self.found.case != before

    def _shows(self, candidate: FoundCase) -> bool:
        """Whether a candidate fails in the same way; if so, it is kept. False once tries or time run out."""
        if candidate in self.known or not self.may_ask():
            return self.known.get(candidate, False)
        right = self.known[candidate] = candidate.fails_so(self.ask(candidate))
        case = candidate if right else self.found.case
        self.found = replace(self.found, case=case, tries=self.found.tries + 1)
        self.tell(self.found)
        return right


def weight(model: DrawnModel) -> tuple[float, ...]:
    """The size of a model: number of steps, then their kinds, then sizes; smaller is easier to read."""
    steps = list(model.all_steps())
    order = {name: place for place, name in enumerate(BLOCKS)}
    return (
        len(steps),
        sum(order[each.block] for each in steps),
        sum(value != _plain_choice(each, name) for each in steps for name, value in each.options),
        sum(sum(each.reads) for each in steps),
        sum(getattr(model, name) != getattr(_PLAIN, name) for name in _CHOSEN),
        len(model.batches),
        sum(model.batches),
        model.width,
        _CAPS.index(model.cap_bytes) if model.cap_bytes in _CAPS else len(_CAPS),
    )


def smaller(model: DrawnModel) -> Iterator[DrawnModel]:
    """Yield each model that is smaller by one change, the most promising first."""
    seen = {repr(model)}
    for candidate in _candidates(model):
        if repr(candidate) not in seen and weight(candidate) < weight(model):
            seen.add(repr(candidate))
            yield candidate


def _without(steps: Steps, gone: int) -> Steps:
    """All steps except one; the others read the same values as before, if those still exist.

    Steps in bodies, outputs, and reads that wrap around keep their numbers.
    """
    return tuple(
        replace(each, reads=tuple(back - (place - back <= gone < place) for back in each.reads))
        for place, each in enumerate(steps)
        if place != gone
    )


def _candidates(model: DrawnModel) -> Iterator[DrawnModel]:
    for place in range(len(model.steps)):
        yield replace(model, steps=_without(model.steps, place))
    yield from _with_each_step(model, _fewer)
    for name, values in _PLAINER.items():
        for value in values:
            yield replace(model, **{name: value})
    yield from _with_each_step(model, _simpler)


def _plain_choice(each: Step, option: str) -> Any:
    return next(iter(BLOCKS[each.block].options[option]))


def _with_each_step(model: DrawnModel, edits: Callable[[Step], Iterator[Steps]]) -> Iterator[DrawnModel]:
    """Replace one step or output by each of its edits."""
    for steps in _edited(model.steps, edits):
        yield replace(model, steps=steps)
    for outputs in _edited(model.outputs, edits):
        yield replace(model, outputs=outputs)


def _edited(steps: Steps, edits: Callable[[Step], Iterator[Steps]]) -> Iterator[Steps]:
    for place, each in enumerate(steps):
        before = steps[:place]
        after = steps[place + 1 :]
        for other in edits(each):
            yield (*before, *other, *after)
        for body in _edited(each.body, edits):
            yield (*before, replace(each, body=body), *after)


def _fewer(each: Step) -> Iterator[Steps]:
    """Nothing, the step without its body, or the body alone."""
    yield ()
    yield (replace(each, body=()),)
    yield each.body


def _simpler(each: Step) -> Iterator[Steps]:
    """The step with simpler options or reads, or the simplest block in its place."""
    yield (step(each.block, body=each.body),)
    for option, _ in each.options:
        plain = tuple((n, _plain_choice(each, n) if n == option else v) for n, v in each.options)
        yield (replace(each, options=plain),)
    for place in range(len(each.reads)):
        yield (replace(each, reads=(*each.reads[:place], 0, *each.reads[place + 1 :])),)
    if not each.body:
        kind = BLOCKS[each.block].place
        yield (step(next(name for name, other in BLOCKS.items() if other.place == kind)),)
