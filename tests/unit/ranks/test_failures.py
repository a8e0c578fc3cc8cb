"""Which rank is to blame, and the words of the report."""

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from ddpopt.ranks.failures import RankFailure, RanksFailed, culprits

IN_A_COLLECTIVE = """\
Thread 0x00007f1 (most recent call first):
  File "/lib/threading.py", line 324 in wait
  File "/lib/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2 (most recent call first):
  File "/site/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 12 in step
  File "<string>", line 1 in <module>
"""
IN_A_STEP = """\
Thread 0x00007f1 (most recent call first):
  File "/site/torch/distributed/elastic/timer.py", line 10 in run
  File "/lib/threading.py", line 1002 in _bootstrap

Thread 0x00007f2 (most recent call first):
  File "/home/me/train.py", line 30 in step
  File "<string>", line 1 in <module>
"""
GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp"


def raising(rank: int, error: str) -> RankFailure:
    stack = f"Traceback (most recent call last):\n{error}\n"
    return RankFailure(rank, "raised", "step 2", exit_code=1, stack=stack)


raised = raising(0, "ValueError: no good")
left_behind = raising(1, f"{GLOO}/pair.cc:553] Connection closed by peer")
timed_out = raising(2, f"{GLOO}/unbound_buffer.cc:78] Timed out waiting 900ms")
killed = RankFailure(3, "died", "step 2", exit_code=-9, signal="SIGKILL", output="last words")
stalled = RankFailure(4, "stalled", "step 2", exit_code=1, stack=IN_A_STEP)
waiting = RankFailure(5, "stalled", "step 2", exit_code=1, stack=IN_A_COLLECTIVE)
ended = RankFailure(6, "ended", "step 2", exit_code=-15, signal="SIGTERM", stack=IN_A_STEP)
ended_waiting = replace(ended, rank=7, stack=IN_A_COLLECTIVE)
IN_A_GATHER = '  File "/x/ddpopt/ranks/exchange.py", line 1 in _await\n  File "a", line 1 in <module>\n'
gathering = replace(ended, rank=9, stack=f"Thread 0x1:\n{IN_A_GATHER}")
missing = raising(10, "ddpopt.ranks.exchange.PeersMissing: expected a value")
TOOK_LONG = "Watchdog caught collective operation timeout"
watchdog = RankFailure(8, "died", "step 2", exit_code=-6, signal="SIGABRT", output=TOOK_LONG)


@pytest.mark.parametrize(
    ("failures", "expected", "exit_code", "of_time_alone"),
    [
        ([raised], [0], 1, False),
        ([raised, left_behind], [0], 1, False),
        ([raised, killed], [0, 3], 3, False),
        ([left_behind, killed], [3], 3, False),
        ([stalled, waiting, left_behind], [4], 3, True),
        ([stalled, watchdog], [4], 3, True),
        ([stalled, gathering, missing], [4], 3, True),
        # It kept its peer waiting until the peer's collective gave up.
        ([timed_out, ended], [6], 3, True),
        # Each waits for another.
        ([timed_out, ended_waiting], [2, 7], 3, True),
        ([waiting, ended_waiting, watchdog], [5, 7, 8], 3, True),
        # Its peers had all returned.
        ([left_behind], [1], 3, True),
    ],
)
def test_culprits_and_passed_limits_are_distinguished_from_all_other_failures(
    failures: list[RankFailure], expected: list[int], exit_code: int, of_time_alone: bool
) -> None:
    assert [failure.rank for failure in culprits(failures)] == expected
    failed = RanksFailed(failures, size=9)
    assert (failed.exit_code, failed.of_time_alone) == (exit_code, of_time_alone)


def test_the_report_shows_what_became_of_the_culprits_and_names_their_peers() -> None:
    assert_expected_inline(
        str(RanksFailed([left_behind, killed, replace(killed, rank=2), ended_waiting], size=8)),
        """\
expected a value from each of 8 ranks, got none from ranks 1, 2, 3, 7; it started with ranks 2, 3
ranks 2, 3 died of SIGKILL in 'step 2'
    last words
SIGKILL usually means the machine ran out of memory: look for 'Killed process' in dmesg.""",
    )


def test_ranks_that_wait_for_each_other_are_told_to_compare_their_collectives() -> None:
    first, *_, last = str(RanksFailed([waiting, ended_waiting], size=8)).splitlines()
    assert first.endswith("got none from ranks 5, 7: in a collective that others did not enter")
    assert last == (
        "Compare the collectives in the stacks: every rank must enter the same ones in the same order."
    )


@pytest.mark.parametrize(
    ("failure", "how", "advice"),
    [
        (stalled, "exceeded its time limit", "--timeout."),
        (ended, "was terminated while its peers waited", "--timeout."),
        (killed, "died of SIGKILL", "in dmesg."),
        (replace(killed, exit_code=0, signal="", output="end"), "ended with exit code 0", "\n    end"),
        (replace(killed, signal="SIGSEGV", output="end"), "died of SIGSEGV", "\n    end"),
        # what we ended ourselves is not blamed on memory
        (replace(killed, kind="stalled"), "exceeded its time limit", "--timeout."),
    ],
)
def test_each_kind_of_failure_has_words_and_a_next_step(failure: RankFailure, how: str, advice: str) -> None:
    text = str(RanksFailed([failure], size=9))
    assert f"\nrank {failure.rank} {how} in 'step 2'\n" in text
    assert text.endswith(advice)


def test_long_stacks_and_outputs_are_cut_to_their_ends() -> None:
    stack = "Traceback (most recent call last):\n" + "  frame\n" * 50 + "KeyError: no\n  key\nSee the docs.\n"
    long = replace(raised, stack=stack, output="line\n" * 30 + "the end\n")
    _, how, *lines = str(RanksFailed([long], size=1)).splitlines()
    assert how == "rank 0 raised an exception in 'step 2': KeyError: no key See the docs."
    assert lines[:40] == [*["      frame"] * 37, "    KeyError: no", "      key", "    See the docs."]
    assert lines[40:] == [*["    line"] * 19, "    the end"]
