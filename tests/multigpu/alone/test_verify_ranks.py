"""The ranks that verification starts or joins: what they bring back, and that nothing makes a run hang.

Tasks fail here in every way that a rank can fail, each under a limit far below that of its test.
"""

import ctypes
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

from ddpopt.errors import InfrastructureError, UsageError
from ddpopt.ranks.environment import environment_of_no_rank
from ddpopt.ranks.failures import FailureKind, RanksFailed
from ddpopt.ranks.group import Ranks, joined, under_torchrun
from ddpopt.ranks.marked import marked
from ddpopt.ranks.pool import LAST_WORDS_S, PATIENCE_S, Pool, launch
from tests.selftest.faults import DEADLY
from tests.selftest.trials import Found, died, try_fault
from tests.support.commands import TWO_RANKS

pytestmark = pytest.mark.timeout(120)

REPOSITORY = Path(__file__).parents[3]
# Of a whole run, where its end is not meant to come from its limit.
AMPLE_S = 60.0
# Of one piece of work, where it is.
SHORT_S = 2.0
# Behind a limit, on a busy machine; all else would end much later.
SLACK_S = 15.0
GROUP_KEY = "DDPOPT_TEST_PROCESSES"


@pytest.fixture(autouse=True)
def processes(of_no_rank: None) -> Iterator[Callable[[], list[int]]]:
    """Finds all processes that a test started, through its own variable in their environments.

    No test may leave one of them, nor change a signal handler, a logger, a thread or the environment.
    """
    name = uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(GROUP_KEY, name)
        before = global_state()
        yield lambda: marked(f"{GROUP_KEY}={name}")
        assert marked(f"{GROUP_KEY}={name}") == []
        assert global_state() == before


def global_state() -> dict[str, Any]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    names = [name for name in logging.root.manager.loggerDict if "distributed.elastic" in name]
    loggers = {name: logging.getLogger(name) for name in names}
    settings = {name: (one.level, [*one.filters], one.propagate) for name, one in loggers.items()}
    return {
        "handlers": [*map(signal.getsignal, numbers), sys.excepthook],
        "logging": {name: own for name, own in settings.items() if own != (logging.NOTSET, [], True)},
        "environment": {**os.environ, "PYTEST_CURRENT_TEST": ""},
        "threads": [thread.name for thread in threading.enumerate() if "ddpopt" in thread.name],
    }


def failing(task: Callable[..., Any], on_event: Callable[[Any], None] = lambda _: None) -> RanksFailed:
    """How two ranks fail at a task."""
    with pytest.raises(RanksFailed) as caught:
        launch(task, nproc=2, limit_s=AMPLE_S, on_event=on_event)
    return caught.value


def told(error: RanksFailed) -> tuple[list[tuple[int, FailureKind]], list[int], int]:
    """Who failed how, whose fault it was, and the exit code."""
    failures = [(failure.rank, failure.kind) for failure in error.failures]
    return failures, [failure.rank for failure in error.culprits], error.exit_code


def soon(sign: Callable[[], bool], limit_s: float = 30.0) -> bool:
    """Whether something is so within some seconds."""
    deadline = time.monotonic() + limit_s
    while not sign() and time.monotonic() < deadline:
        time.sleep(0.02)
    return sign()


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return str(folder / "script.py")


def start(*words: str, folder: Path | None = None) -> "subprocess.Popen[str]":
    command, pipe = [sys.executable, *words], subprocess.PIPE
    environment = {**environment_of_no_rank(), "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    out, err = process.communicate(timeout=90)
    return process.returncode, out + err


# ------------------------------------------------------------------------------------------- what comes back

WITHOUT_A_GUARD = """
import threading, time, torch, torch.distributed as dist
from ddpopt.ranks.pool import launch

class Told:
    def __init__(self, text):
        self.text = text

def task(ranks, offset):
    total = torch.tensor([ranks.rank + offset])
    dist.all_reduce(total)
    for step in range(3):
        ranks.emit(Told(f"step {step} on rank {ranks.rank}"))
    others = ranks.gather(Told(f"rank {ranks.rank} of {ranks.size} on {ranks.device} by {ranks.backend}"))
    return Told(f"{total.item()}, {torch.get_num_threads()} thread, {[other.text for other in others]}")

heard = []
for value in launch(task, 10, nproc=2, limit_s=60, on_event=heard.append):
    assert isinstance(value, Told)
    print(value.text)
print([event.text for event in heard])
print(launch(lambda ranks: ranks.size, nproc=1, limit_s=60))
"""


def test_a_script_without_a_main_guard_gets_each_ranks_value_and_rank_zeros_events_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code, text = finish(start(script(tmp_path, WITHOUT_A_GUARD)))
    others = "['rank 0 of 2 on cpu by gloo', 'rank 1 of 2 on cpu by gloo']"
    heard = "['step 0 on rank 0', 'step 1 on rank 0', 'step 2 on rank 0']"
    assert (code, text.splitlines()) == (0, [*[f"21, 1 thread, {others}"] * 2, heard, "[1]"])


def test_arguments_that_make_no_sense_are_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"expected at least one rank, got 0"):
        launch(lambda ranks: None, nproc=0, limit_s=1)
    with pytest.raises(UsageError, match=r"expected the device 'cpu', 'cuda' or None, got 'tpu'"):
        launch(lambda ranks: None, nproc=1, limit_s=1, device="tpu")
    with pytest.raises(UsageError, match=r"can be pickled, got cannot pickle '_thread.lock' object. Create"):
        launch(lambda ranks, lock: None, threading.Lock(), nproc=1, limit_s=1)
    with pytest.raises(UsageError, match=r"expected a GPU for each of 99 ranks, found \d+; ask for fewer"):
        launch(lambda ranks: None, nproc=99, limit_s=1, device="cuda")


# ------------------------------------------------------------------------------------------ ranks that raise


def test_each_rank_that_raises_is_reported_and_nothing_else(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def task(ranks: Ranks) -> None:
        with ranks.limited(AMPLE_S, "the step"):
            time.sleep(0.3 * ranks.rank)
            raise ValueError(f"wrong on rank {ranks.rank}")

    error = failing(task)
    assert told(error) == ([(0, "raised"), (1, "raised")], [0, 1], 1)
    assert [failure.what for failure in error.failures] == ["the step", "the step"]
    for rank, failure in enumerate(error.failures):
        assert failure.stack.endswith(f"ValueError: wrong on rank {rank}\n")
        assert failure.stack in error.args[0].replace("\n    ", "\n") + "\n"
    assert capfd.readouterr() == ("", "")
    assert caplog.messages == []


def test_a_peer_that_fails_because_a_rank_raised_is_heard_out_and_is_no_culprit() -> None:
    class SlowToSay(Exception):
        def __str__(self) -> str:
            time.sleep(PATIENCE_S + 0.5)  # the other rank is gone; this one is asked to end
            return "said at last"

    def task(ranks: Ranks) -> None:
        if ranks.rank == 1:
            raise ValueError("only rank 1 says this")
        try:
            ranks.gather(None)
        except InfrastructureError as error:
            raise SlowToSay from error

    error = failing(task)
    assert told(error) == ([(0, "raised"), (1, "raised")], [1], 1)
    assert "in gather" in error.failures[0].stack
    assert "said at last" in error.failures[0].stack


def test_a_value_that_cannot_travel_and_a_task_that_exits_count_as_raising() -> None:
    def task(ranks: Ranks) -> object:
        ranks.gather(None)  # a rank that leaves at once may do so while its peer still joins
        if ranks.rank == 0:
            sys.exit(0)
        return threading.Lock()

    error = failing(task)
    assert told(error) == ([(0, "raised"), (1, "raised")], [0, 1], 1)
    assert error.failures[0].stack.endswith("SystemExit: 0\n")
    words = "expected a lock that can be pickled, got cannot pickle '_thread.lock' object. Return plain data"
    assert words in error.failures[1].stack


def test_an_error_of_the_listener_ends_the_run_and_reaches_the_caller() -> None:
    def task(ranks: Ranks) -> None:
        ranks.emit("stop")
        time.sleep(1000)

    def stop(event: object) -> None:
        raise KeyError(event)

    with pytest.raises(KeyError, match="stop"):
        launch(task, nproc=2, limit_s=AMPLE_S, on_event=stop)


# -------------------------------------------------------------------------------------------- ranks that die


def crash_in_native_code() -> None:
    ctypes.string_at(0)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("die", "name"),
    [pytest.param(crash_in_native_code, "SIGSEGV", marks=pytest.mark.nightly), (be_killed, "SIGKILL")],
)
def test_a_rank_that_a_signal_ends_is_reported_with_what_it_had_said_and_the_call_that_it_was_in(
    die: Callable[[], None], name: str
) -> None:
    def task(ranks: Ranks) -> None:
        ranks.emit("before")
        dist.barrier()
        if ranks.rank == 1:
            sys.stderr.write("last ")
            sys.stdout.write("words")
            die()
        dist.barrier()

    heard: list[object] = []
    error = failing(task, on_event=heard.append)
    (culprit,) = error.culprits
    assert (culprit.rank, culprit.kind, culprit.signal) == (1, "died", name)
    assert (culprit.what, culprit.output) == ("running the task", "last words")
    assert f"in {die.__name__}" in culprit.stack or die is be_killed  # which lets nothing be said
    assert (error.exit_code, heard) == (3, ["before"])


def test_a_rank_that_exits_without_a_value_has_died_and_its_peers_are_not_waited_for(tmp_path: Path) -> None:
    joined = tmp_path / "joined"

    def task(ranks: Ranks) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if ranks.rank == 1:
            while not joined.exists():  # a peer that is still joining would raise
                time.sleep(0.01)
            os._exit(0)
        joined.touch()
        time.sleep(1000)

    error = failing(task)
    assert told(error) == ([(0, "ended"), (1, "died")], [1], 3)
    assert error.culprits[0].exit_code == 0
    assert "ended with exit code 0 in" in str(error)


# the other faults of the self-test leave their ranks alive: tests/multigpu/test_verify.py
@pytest.mark.nightly
def test_a_fault_that_takes_a_rank_down_is_found(tmp_path: Path) -> None:
    def task(ranks: Ranks) -> Found:
        return try_fault(ranks, DEADLY, (tmp_path / str(ranks.rank)).touch)[1]

    try:
        found = launch(task, nproc=2, limit_s=AMPLE_S, device="cpu")[0]
    except RanksFailed as failed:
        found = died(DEADLY, [(tmp_path / str(rank)).exists() for rank in range(2)], str(failed))
    assert (found.complaint, bool(found.by)) == ("", True)


# ------------------------------------------------------------------------------------------ ranks that stall


def sleep_in_c_with_pythons_lock() -> None:
    ctypes.PyDLL(None).sleep(1000)


def test_a_rank_that_stalls_ends_at_its_limit_and_its_peer_shows_where_it_waits() -> None:
    def task(ranks: Ranks) -> None:
        dist.barrier()
        ranks.emit(time.monotonic())
        with ranks.limited(AMPLE_S, "the step"), ranks.limited(SHORT_S, "its backward"):
            if ranks.rank == 1:
                sleep_in_c_with_pythons_lock()
            dist.barrier()

    began: list[Any] = []
    error = failing(task, on_event=began.append)
    assert time.monotonic() - began[0] < SHORT_S + SLACK_S
    assert ([failure.rank for failure in error.culprits], error.exit_code) == ([1], 3)
    waiting, stalled = error.failures
    assert (stalled.kind, stalled.what) == ("stalled", "its backward")
    assert "in sleep_in_c_with_pythons_lock" in stalled.stack
    assert waiting.kind in ("stalled", "ended")  # whichever limit is first
    assert "in barrier" in waiting.stack


@pytest.mark.nightly
def test_a_stopped_process_cannot_keep_a_run_from_ending_at_its_limit() -> None:
    def task(ranks: Ranks) -> None:
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    limit_s = 3.0
    with Pool(2) as pool:
        assert pool.run(lambda ranks: ranks.rank, limit_s=AMPLE_S) == [0, 1]
        began = time.monotonic()
        with pytest.raises(RanksFailed) as caught:
            pool.run(task, limit_s=limit_s)
        assert time.monotonic() - began < limit_s + LAST_WORDS_S + SLACK_S
        assert pool.run(lambda ranks: ranks.size, limit_s=AMPLE_S) == [2, 2]  # on new ranks
    error = caught.value
    assert error.failures[0].waits_for_peers  # by an error of gloo's, if the limit of collectives was first
    assert (error.culprits, error.exit_code) == (error.failures[1:], 3)
    assert error.failures[1].kind == "stalled"


# ------------------------------------------------------------------------------------------ where ranks part


def part(how: str) -> None:
    """What a rank does where its peer sends a sum of four numbers."""
    if how == "raises":
        raise ValueError("mine")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "stalls":
        time.sleep(1000)
    if how == "sends another kind":
        dist.broadcast(torch.ones(4), 1)
    if how == "leaves":
        return
    dist.all_reduce(torch.ones(4))


SENT = "all_reduce of Float [4]"
BEHIND = "rank 1 has not entered it; the last before was 1, all_reduce of Float [3]"
ALONE = f"rank 0 waits in group 0 (default_pg), collective 2, {SENT}"
PARTINGS = {
    "raises": BEHIND,
    "dies": ALONE,
    "stops": ALONE,
    "stalls": BEHIND,
    "sends another kind": "rank 1 sent broadcast of Float [4]",
    "leaves": ALONE,
}
"""What is said of each; nobody has a record of a rank that is killed, or that has left."""
PARTS_BY_DAY = ("raises", "sends another kind")


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how in PARTS_BY_DAY else pytest.mark.nightly) for how in PARTINGS]
)
def test_where_ranks_part_is_said_however_one_fails(how: str) -> None:
    def task(ranks: Ranks) -> None:
        dist.all_reduce(torch.ones(3))
        if ranks.rank == 1:
            part(how)
        else:
            dist.all_reduce(torch.ones(4))

    def warm(ranks: Ranks) -> None:  # what is sent in an earlier task is none of this one's
        importlib.import_module("torch._dynamo")
        for size in (5, 6, 7):
            dist.all_reduce(torch.ones(size))

    with Pool(2) as pool:
        pool.run(warm, limit_s=AMPLE_S)
        with pytest.raises(RanksFailed) as caught:
            pool.run(task, limit_s=8.0)
    said = str(caught.value)
    assert caught.value.parting in said
    assert PARTINGS[how] in said
    assert "[5]" not in said


# ------------------------------------------------------------------------------------ nothing is left behind


def test_a_tasks_own_children_end_with_the_run(processes: Callable[[], list[int]]) -> None:
    def task(ranks: Ranks) -> bool:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        return soon(lambda: len(processes()) >= 3)  # this rank, its child and the guardian

    assert launch(task, nproc=1, limit_s=AMPLE_S) == [True]
    assert processes() == []


LAUNCHER = """
import os, signal, subprocess, time
from ddpopt.ranks.pool import launch

# Who started the tests may have them ignore it, as a shell does behind '&'.
signal.signal(signal.SIGINT, signal.default_int_handler)

def task(ranks):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    ranks.gather(None)
    ranks.emit(next(value for name, value in os.environ.items() if name.startswith("DDPOPT_RANKS_")))
    time.sleep(1000)

launch(task, nproc=1, limit_s=80, on_event=lambda folder: print(folder, flush=True))
"""


# SIGTERM ends a process as SIGKILL does: no line of Python's runs. Ctrl-C is an exception.
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_when_the_launching_process_is_ended_all_else_ends(
    number: signal.Signals, tmp_path: Path, processes: Callable[[], list[int]]
) -> None:
    launcher = start(script(tmp_path, LAUNCHER))
    assert launcher.stdout is not None
    folder = launcher.stdout.readline().strip()
    assert Path(folder).is_dir()
    # the launcher, its guardian, the rank and its child, whose environment is there a moment after itself
    assert soon(lambda: len(processes()) == 4)
    launcher.send_signal(number)
    code, said = finish(launcher)
    assert code == -number, said
    assert soon(lambda: not processes() and not Path(folder).exists())


# ------------------------------------------------------------------------------------------ ranks that exist

JOINING = """
import sys, time
from ddpopt.ranks.group import joined, under_torchrun

assert under_torchrun()
heard = []
with joined(on_event=heard.append, timeout_s=30) as ranks:
    gathered = ranks.gather(ranks.rank * 10)
    ranks.emit("done")
    # One piece: both ranks write to the same terminal.
    sys.stdout.write(f"{ranks.rank} of {ranks.size}: {gathered} {heard}\\n")
    sys.stdout.flush()
    with ranks.limited(2, "the step"):
        time.sleep(1000 if "stall" in sys.argv else 0)
"""


def joined_ranks_said(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if " of 2: " in line)


JOINED = ["0 of 2: [0, 10] ['done']", "1 of 2: [0, 10] []"]


def test_torchruns_ranks_are_joined_and_each_that_passes_a_limit_shows_where_it_was(tmp_path: Path) -> None:
    code, text = finish(start(*TWO_RANKS, script(tmp_path, JOINING), "stall", folder=tmp_path))
    assert joined_ranks_said(text) == JOINED, text
    assert "Timeout (0:00:02" in text or "Timeout (0:00:01" in text
    assert f'File "{tmp_path}/script.py", line 14 in <module>' in text
    assert "what this rank sent is in ddpopt-hang/rank_" in text
    assert [*(tmp_path / "ddpopt-hang").glob("rank_*")]
    assert code != 0


@pytest.mark.nightly
def test_ranks_on_two_nodes_are_joined(tmp_path: Path) -> None:
    c10d: Any = dist  # torch does not mark its re-exports
    # This process holds the store that the nodes meet at: nobody else can take its port in between.
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{store.port} --rdzv-conf=is_host=0"
    node = f"-m torch.distributed.run --nnodes=2 --nproc-per-node=1 --local-addr=127.0.0.1 {meeting}".split()
    nodes = [start(*node, script(tmp_path, JOINING)) for _ in range(2)]
    ended = [finish(process) for process in nodes]
    assert [code for code, _ in ended] == [0, 0], ended
    assert joined_ranks_said("".join(text for _, text in ended)) == JOINED


def test_an_exception_is_written_before_the_group_is_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "0"}
    for name, value in (one | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}).items():
        monkeypatch.setenv(name, value)
    written_before: list[str] = []
    leave = dist.destroy_process_group

    def note_and_leave() -> None:
        written_before.append(capfd.readouterr().err)
        leave()

    monkeypatch.setattr(dist, "destroy_process_group", note_and_leave)
    with pytest.raises(ValueError, match="wrong"), joined():
        raise ValueError("wrong")
    assert not dist.is_initialized()
    assert written_before[0].startswith("rank 0 failed:\nTraceback")
    assert written_before[0].endswith("ValueError: wrong\n")


def test_without_ranks_there_is_nothing_to_join() -> None:
    assert not under_torchrun()
    expected = r"got neither torchrun's environment nor a default process group. Start this with 'torchrun"
    with pytest.raises(UsageError, match=expected), joined():
        pass
