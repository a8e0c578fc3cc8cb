"""ddpopt.judge.trials.simulated: however trials are divided among processes, each has its own result."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpopt.errors import InfrastructureError
from ddpopt.judge.trials import simulated
from ddpopt.judge.trials.on_rank import Ended, Request, Settings, Started
from ddpopt.judge.trials.simulated import Shares
from ddpopt.judge.verdict import Status, Trial


class Process:
    """One process, which needs no rank: it says of each trial that it began and ended."""

    device = "cpu"
    fails_at = ""

    def __init__(self, requests: list[Request], settings: Settings, tell: Callable[[Any], None]) -> None:
        self.requests = requests
        self.tell = tell

    def run(self, nproc: int, limit_s: float, device: str | None) -> tuple[Trial, ...]:
        trials = []
        for index, request in enumerate(self.requests):
            case, mode = str(request.target), str(request.modes[0])
            if mode == self.fails_at:
                raise InfrastructureError(f"no process for {mode}")
            trial = Trial(case, mode, request.option, "eager", Status.OK)
            self.tell(Started(index, case, request.option, mode))
            self.tell(Ended(index, trial))
            trials.append(trial)
        return tuple(trials)


NAMES = st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True, min_size=1, max_size=4)


@given(st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=3), st.integers(1, 9), st.booleans())
def test_each_trial_has_its_result_and_its_place(
    requested: list[tuple[list[str], list[str]]], cores: int, on_gpu: bool
) -> None:
    requests = [Request(case, "default", tuple(modes)) for cases, modes in requested for case in cases]
    expected = [(request.target, mode) for request in requests for mode in request.modes]
    events: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "Attempts", Process)
        patch.setattr("os.cpu_count", lambda: cores)
        shares = Shares(requests, Settings("eager", simulate=8), events.append)
        trials = shares.run(60.0, "cuda" if on_gpu else None)
    assert [(trial.case, trial.mode) for trial in trials] == expected
    assert shares.device == "cpu"
    for kind in (Started, Ended):
        seen = [event for event in events if isinstance(event, kind)]
        assert sorted(event.index for event in seen) == [*range(len(expected))]
        named = [event.trial if isinstance(event, Ended) else event for event in seen]
        assert {event.index: (one.case, one.mode) for event, one in zip(seen, named, strict=True)} == {
            **dict(enumerate(expected))
        }


def test_a_process_that_fails_ends_the_run_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "Attempts", Process)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(Process, "fails_at", "b")
    shares = Shares(
        [Request("gpt", "default", ("a", "b", "c"))], Settings("eager", simulate=8), lambda _: None
    )
    with pytest.raises(InfrastructureError, match="no process for b"):
        shares.run(60.0, None)
