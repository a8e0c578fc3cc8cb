"""ddpopt.judge.lost: what a failure of the ranks takes with it, and what is not tried again."""

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
EAGER = Settings("eager")


def test_the_trial_in_which_a_rank_died_is_broken_and_no_other() -> None:
    lost = lost_trials(ASKED, EAGER, Started(1, "tied", "default", "whole"), KILLED)
    assert list(lost) == [1]
    assert (lost[1].status, lost[1].mode, lost[1].case) == (Status.BROKEN, "whole", "tied")
    assert "SIGKILL" in lost[1].reason


def test_a_mode_under_which_a_rank_died_is_not_tried_again_under_that_option() -> None:
    lost = lost_trials(ASKED, EAGER, Started(2, "tied", "join", "torch"), KILLED)
    assert {index: trial.reason for index, trial in lost.items() if index != 2} == {
        5: "not tried again: on tied rank 1 died (SIGKILL)"
    }
    assert {trial.status for trial in lost.values()} == {Status.BROKEN}


def test_of_several_threads_the_one_that_crashed_is_named() -> None:
    waiting = 'Thread 0x01 (most recent call first):\n  File "/lib/threading.py", line 331 in wait\n'
    crashing = 'Current thread 0x02 (most recent call first):\n  File "/lib/reduce.py", line 7 in send\n'
    crashed = RanksFailed([RankFailure(0, "died", "a trial", -11, "SIGSEGV", stack=waiting + crashing)], 2)
    lost = lost_trials(ASKED, EAGER, Started(2, "tied", "join", "torch"), crashed)
    assert lost[5].reason == 'not tried again: on tied rank 0 died (SIGSEGV), in reduce.py", line 7 in send'


def test_a_trial_in_which_a_rank_raised_outside_of_its_reach_is_wrong() -> None:
    lost = lost_trials(ASKED, EAGER, Started(4, "gpt", "default", "torch"), RAISED)
    assert list(lost) == [4]
    assert lost[4].status is Status.WRONG
    assert "ValueError: no" in lost[4].findings[0].message


def test_where_eager_itself_died_only_that_case_and_option_are_not_possible() -> None:
    lost = lost_trials(ASKED, EAGER, Started(2, "tied", "join", ""), KILLED)
    assert sorted(lost) == [2, 3]
    assert {trial.status for trial in lost.values()} == {Status.NOT_POSSIBLE}
    assert {trial.reason for trial in lost.values()} == {
        "eager DDP itself fails here, on tied: rank 1 died (SIGKILL)"
    }


def test_where_eager_itself_only_took_too_long_nothing_was_judged_and_the_limit_is_named() -> None:
    lost = lost_trials(ASKED, EAGER, Started(2, "tied", "join", ""), STALLED)
    assert {index: (trial.status, trial.reason) for index, trial in lost.items()} == dict.fromkeys(
        (2, 3),
        (
            Status.BROKEN,
            'eager DDP did not come to an end, on tied: rank 1 stalled, in slow.py", line 3 in f. '
            "If it is only slow, raise --timeout.",
        ),
    )


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
