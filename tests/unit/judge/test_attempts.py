"""ddpopt.judge.attempts: what a failure of the ranks takes with it, and what is not tried again.

The ranks are played by functions that answer what ranks would.
"""

from collections.abc import Callable
from typing import Any

import pytest

from ddpopt.judge.attempts import Attempts
from ddpopt.judge.trials import Asked, Ended, Judging, Settings, Started
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.failures import RankFailure, RanksFailed

ASKED = [
    Asked("tied", "default", ("torch", "whole")),
    Asked("tied", "join", ("torch", "whole")),
    Asked("gpt", "default", ("torch",)),
    Asked("gpt", "join", ("torch", "eager")),
]
KILLED = RanksFailed([RankFailure(1, "died", "a trial", -9, "SIGKILL")], 2)
RAISED = RanksFailed([RankFailure(1, "raised", "a trial", 1, stack="ValueError: no")], 2)
STALLED = RanksFailed(
    [RankFailure(1, "stalled", "a trial", 1, stack='  File "/home/me/slow.py", line 3 in f')], 2
)
THREADS = """\
Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 331 in wait
Current thread 0x02 (most recent call first):
  File "/lib/reduce.py", line 7 in send
"""
CRASHED = RanksFailed([RankFailure(0, "died", "a trial", -11, "SIGSEGV", stack=THREADS)], 2)

OK, WRONG, LOST, BROKEN = Status.OK, Status.WRONG, Status.NOT_POSSIBLE, Status.BROKEN
Failing = dict[tuple[int, str], RanksFailed]


class Ranks:
    """Ranks that fail where they are told to, and say that everything else is right.

    Each question takes a second. Eager's runs are called ``eager``; before them ranks have to start.
    """

    def __init__(self, failing: Failing, limit_s: float = 3600) -> None:
        self.failing = failing
        self.left_s = limit_s
        self.asked: list[tuple[int, str]] = []

    def time_left(self) -> float:
        return self.left_s

    def ask(self, task: Callable[..., Any], place: int, name: str = "") -> Any:
        name = name or {Judging.begin: "start", Judging.prepare: "eager"}[task]
        self.left_s -= 1
        self.asked.append((place, name))
        if (failed := self.failing.get((place, name))) is not None:
            raise failed
        case, option = str(ASKED[place].target), ASKED[place].option
        return (case, "cpu") if name == "start" else Trial(case, name, option, "eager", OK)


def judged(ranks: Ranks) -> tuple[list[Trial], list[object]]:
    told: list[object] = []
    attempts = Attempts(ranks.ask, ASKED, Settings("eager"), told.append, ranks.time_left)
    return [*attempts.run()], told


def statuses(failing: Failing) -> list[Status]:
    return [trial.status for trial in judged(Ranks(failing))[0]]


def test_everything_is_judged_in_order_and_told_as_it_begins_and_ends() -> None:
    ranks = Ranks({})
    trials, told = judged(ranks)
    assert [(trial.case, trial.option, trial.mode) for trial in trials] == [
        (one.target, one.option, name) for one in ASKED for name in one.modes
    ]
    assert ranks.asked[:6] == [(0, name) for name in ("start", "eager", "torch", "start", "eager", "whole")]
    assert told[:2] == [Started("tied", "default", "torch"), Ended(trials[0])]
    assert len(told) == 2 * len(trials)


@pytest.mark.parametrize(
    ("failure", "status", "words"), [(KILLED, BROKEN, "SIGKILL"), (RAISED, WRONG, "ValueError: no")]
)
def test_the_trial_in_which_a_rank_died_is_broken_or_if_it_raised_wrong_and_no_other(
    failure: RanksFailed, status: Status, words: str
) -> None:
    trials, _ = judged(Ranks({(0, "whole"): failure}))
    assert [trial.status for trial in trials] == [OK, status, *[OK] * 5]
    assert words in (trials[1].findings[0].message if trials[1].findings else trials[1].reason)


def test_a_mode_under_which_a_rank_died_is_not_tried_again_under_that_option() -> None:
    ranks = Ranks({(1, "torch"): CRASHED})
    trials, _ = judged(ranks)
    assert [trial.status for trial in trials] == [OK, OK, BROKEN, OK, OK, BROKEN, OK]
    assert trials[5].reason == 'not tried again: on tied rank 0 died (SIGSEGV), in reduce.py", line 7 in send'
    assert (3, "torch") not in ranks.asked


@pytest.mark.parametrize(
    ("failure", "status", "reason"),
    [
        (KILLED, LOST, "eager DDP itself fails here, on tied: rank 1 died (SIGKILL)"),
        (
            STALLED,
            BROKEN,
            'eager DDP did not come to an end, on tied: rank 1 stalled, in slow.py", line 3 in f. '
            "If it is only slow, raise --timeout.",
        ),
    ],
)
def test_where_eager_itself_fails_that_case_and_option_are_lost_and_the_limit_is_named_if_it_passed(
    failure: RanksFailed, status: Status, reason: str
) -> None:
    ranks = Ranks({(1, "eager"): failure})
    trials, _ = judged(ranks)
    assert [trial.status for trial in trials] == [OK, OK, status, status, OK, OK, OK]
    assert [(trial.mode, trial.reason) for trial in trials[2:4]] == [("torch", reason), ("whole", reason)]
    assert ranks.asked.count((1, "eager")) == 1


def test_what_a_run_had_no_time_for_is_broken_and_says_so() -> None:
    trials, _ = judged(Ranks({}, limit_s=9.0))
    assert [trial.status for trial in trials] == [*[OK] * 3, *[BROKEN] * 4]
    assert [(trial.mode, trial.backend) for trial in trials[5:]] == [("torch", "eager"), ("eager", "")]
    assert {trial.reason for trial in trials[3:]} == {
        "not tried: the limit of the whole run had passed. Raise it, or ask for less."
    }


def test_a_run_whose_limit_passes_while_ranks_start_keeps_what_it_has() -> None:
    trials, _ = judged(Ranks({(0, "start"): STALLED}, limit_s=1.0))
    assert {trial.reason.partition(".")[0] for trial in trials} == {
        "not tried: the limit of the whole run had passed"
    }


@pytest.mark.parametrize("before", [{}, {(0, "eager"): KILLED}])
def test_a_failure_before_any_trial_is_nobodys(before: Failing) -> None:
    with pytest.raises(RanksFailed, match="died of SIGKILL"):
        statuses({**before, (1, "start"): KILLED})
