"""Making a failure small.

First how it is run: as few steps and ranks as show it, a simpler backend, so that all that follows costs
less. Then whole steps of the model, many at a time, by delta debugging; then one change after the other. What
fails in another way is no smaller version of the failure: it is counted, and left.
Invariant: what comes out was seen to fail as what went in.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ddpopt.errors import NotJudgedError
from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.questions import Answer, Setting
from ddpopt.fuzz.shrinking import keeping, smaller
from ddpopt.fuzz.sizes import Size, size_of
from ddpopt.judge.locating.narrow import narrowed
from ddpopt.testing.drawn import DrawnModel

TRIES = 400
BACKENDS = ("eager", "aot_eager")
"""From the simplest on."""
Ask = Callable[[FoundCase], Answer]


@dataclass(frozen=True)
class SoFar:
    """How far a search is.

    Attributes:
        case: the smallest so far.
        tries: how many models were tried.
        drifted: how many of them failed in another way.
    """

    case: FoundCase
    tries: int
    drifted: int


@dataclass(frozen=True)
class Minimized:
    """What a search came to.

    Attributes:
        case: the smallest that was found to fail in the same way.
        given: what went in.
        before: size of what went in.
        after: size of what came out.
        tries: how many models were tried.
        ended: whether nothing smaller fails so; else the search ran out of tries or time.
        drifted: failures of another kind that were met and left, with how often.
    """

    case: FoundCase
    given: FoundCase
    before: Size
    after: Size
    tries: int
    ended: bool
    drifted: Mapping[str, int] = field(default_factory=dict)


def minimized(
    case: FoundCase,
    ask: Ask,
    *,
    tries: int = TRIES,
    seconds: float | None = None,
    tell: Callable[[SoFar], None] = lambda _: None,
) -> Minimized:
    """Search for a small model that fails in the same way.

    Args:
        case: the failure.
        ask: what comes of a case.
        tries: how many models may be asked about.
        seconds: how long it may take; None for no limit.
        tell: told after each model.

    Returns:
        The smallest case that was found.

    Raises:
        NotJudgedError: the case does not fail as it says.
    """
    search = _Search(case, ask, tries, None if seconds is None else time.monotonic() + seconds, tell)
    first = ask(case)
    if not case.fails_so(first):
        raise NotJudgedError(
            f"expected a case that fails as it says: {case.signature}; here it comes to: {first}. "
            f"It was found with torch {case.torch or 'of a release that it does not name'}"
        )
    search.run()
    return Minimized(
        search.case,
        case,
        size_of(case.model),
        size_of(search.case.model),
        search.tries,
        search.ended,
        dict(search.drifted),
    )


class _Search:
    """What is known of one failure."""

    def __init__(
        self, case: FoundCase, ask: Ask, tries: int, end: float | None, tell: Callable[[SoFar], None]
    ) -> None:
        self.case = case
        self.tries = 0
        self.ended = False
        self.drifted: Counter[str] = Counter()
        self._ask = ask
        self._left = tries
        self._end = end
        self._tell = tell
        self._known: dict[FoundCase, bool] = {}

    def run(self) -> None:
        """Make the case smaller until nothing helps."""
        self._plainer_setting()
        self._fewer_steps()
        while self._smaller_model():
            pass
        self._plainer_setting()
        self.ended = self._left > 0 and not self._late()

    def _plainer_setting(self) -> None:
        """Each setting that is plainer than what is there by then."""
        for plainer in _PLAINER:
            for setting in plainer(self.case.setting):
                if self._shows(replace(self.case, setting=setting)):
                    break

    def _fewer_steps(self) -> None:
        """Whole steps go first, many at a time."""
        whole = self.case.model

        def shows(places: tuple[int, ...]) -> bool:
            return self._shows(self._with(replace(whole, steps=keeping(whole.steps, places))))

        narrowed(range(len(whole.steps)), shows, tries=self._left)

    def _smaller_model(self) -> bool:
        """Make each change that still fails so; the next one is tried where the last one was made."""
        place, before = 0, self.case
        candidates = list(smaller(self.case.model))
        while place < len(candidates):
            if self._shows(self._with(candidates[place])):
                candidates = list(smaller(self.case.model))
            else:
                place += 1
        return self.case != before

    def _with(self, model: DrawnModel) -> FoundCase:
        return replace(self.case, model=model)

    def _shows(self, candidate: FoundCase) -> bool:
        """Whether a candidate fails in the same way, and is kept; not, where nothing may be asked now."""
        if candidate in self._known:
            return self._known[candidate]
        if self._left <= 0 or self._late():
            return False
        self._left -= 1
        self.tries += 1
        answer = self._ask(candidate)
        right = candidate.fails_so(answer)
        if not right and answer.signature is not None:
            self.drifted[str(answer)] += 1
        self._known[candidate] = right
        self.case = candidate if right else self.case
        self._tell(SoFar(self.case, self.tries, self.drifted.total()))
        return right

    def _late(self) -> bool:
        return self._end is not None and time.monotonic() > self._end


def _fewer_steps(setting: Setting) -> Iterator[Setting]:
    for steps in range(1, setting.steps):
        yield replace(setting, steps=steps)


def _fewer_ranks(setting: Setting) -> Iterator[Setting]:
    for nproc in range(1, setting.nproc):
        yield replace(setting, nproc=nproc)


def _simpler_backend(setting: Setting) -> Iterator[Setting]:
    known = setting.backend in BACKENDS
    for backend in BACKENDS[: BACKENDS.index(setting.backend)] if known else BACKENDS:
        yield replace(setting, backend=backend)


_PLAINER: tuple[Callable[[Setting], Iterator[Setting]], ...] = (_fewer_ranks, _fewer_steps, _simpler_backend)
