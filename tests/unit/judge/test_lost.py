"""ddpopt.judge.lost: what a failure of the ranks takes with it, and what is not tried again."""

import pytest

from ddpopt.judge.lost import lost_trials, stopped, too_late
from ddpopt.judge.trials import Asked, Settings, Started
from ddpopt.judge.verdict import Status
from ddpopt.ranks.failures import RankFailure, RanksFailed

ASKED = [
    Asked("tied", "default", ("torch", "whole")),
    Asked("tied", "join", ("torch", "whole")),
    Asked("gpt", "default", ("torch",)),
    Asked("gpt", "join", ("torch", "whole")),
    Asked("t5", "join", ("eager",)),
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
EAGER = Settings("eager")


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [(KILLED, Status.BROKEN, "SIGKILL"), (RAISED, Status.WRONG, "ValueError: no")],
)
def test_the_trial_in_which_a_rank_died_is_broken_or_if_it_raised_wrong_and_no_other(
    failure: RanksFailed, status: Status, words: str
) -> None:
    lost = lost_trials(ASKED, EAGER, Started(1, "tied", "default", "whole"), failure)
    assert list(lost) == [1]
    assert (lost[1].status, lost[1].mode, lost[1].case) == (status, "whole", "tied")
    assert words in (lost[1].findings[0].message if lost[1].findings else lost[1].reason)


def test_a_mode_under_which_a_rank_died_is_not_tried_again_under_that_option() -> None:
    lost = lost_trials(ASKED, EAGER, Started(2, "tied", "join", "torch"), CRASHED)
    assert sorted(lost) == [2, 5]
    assert lost[5].reason == 'not tried again: on tied rank 0 died (SIGSEGV), in reduce.py", line 7 in send'
    assert {trial.status for trial in lost.values()} == {Status.BROKEN}


@pytest.mark.parametrize(
    ("failure", "status", "reason"),
    [
        (
            KILLED,
            Status.NOT_POSSIBLE,
            "eager DDP itself fails here, on tied: rank 1 died (SIGKILL)",
        ),
        (
            STALLED,
            Status.BROKEN,
            'eager DDP did not come to an end, on tied: rank 1 stalled, in slow.py", line 3 in f. '
            "If it is only slow, raise --timeout.",
        ),
    ],
)
def test_where_eager_itself_fails_that_case_and_option_are_lost_and_the_limit_is_named_if_it_passed(
    failure: RanksFailed, status: Status, reason: str
) -> None:
    lost = lost_trials(ASKED, EAGER, Started(2, "tied", "join", ""), failure)
    assert {index: (trial.status, trial.reason) for index, trial in lost.items()} == {
        2: (status, reason),
        3: (status, reason),
    }


def test_the_trial_in_which_the_limit_of_the_run_passed_says_where_the_ranks_were() -> None:
    ((index, trial),) = stopped(ASKED, EAGER, Started(5, "gpt", "join", ""), KILLED).items()
    assert (index, trial.case, trial.mode, trial.status) == (5, "gpt", "torch", Status.BROKEN)
    assert trial.reason.startswith("the limit of the whole run passed meanwhile: expected a value from each")


def test_what_a_run_had_no_time_for_is_broken_and_says_so() -> None:
    late = too_late(ASKED, EAGER, (0, 1, 2, 3, 4), 90)
    assert [(index, trial.mode, trial.backend) for index, trial in late.items()] == [
        (5, "torch", "eager"),
        (6, "whole", "eager"),
        (7, "eager", ""),
    ]
    assert {(trial.status, trial.reason) for trial in late.values()} == {
        (
            Status.BROKEN,
            "not tried: the limit of the whole run, 90 s, had passed. Raise it, or ask for less.",
        )
    }
