"""Run torch's tests, each in separate processes, forked from one that has only done the imports.

Invariant: no run outlives its limit, and none leaves a process, a patch or compiled code behind.
"""

import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
import unittest
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ci.torch_ddp.table import EAGER, Ending, Job, Outcome

RANKS = 2
SMALL_CAP_MB = 0.0002
"""About 200 bytes: most parameters of the tests' models are larger."""
FORK = multiprocessing.get_context("fork")
POLL_S = 0.02
KEPT_CHARACTERS = 4000
EAGER_SHARE = 0.25
"""Share of the limit for eager: if a test takes longer, a timeout of a compiled run proves nothing."""


@dataclass(frozen=True)
class Settings:
    """How to run tests.

    Attributes:
        backend: the Dynamo backend underneath.
        limit_s: how long one run may take.
        workers: the number of concurrent runs.
    """

    backend: str
    limit_s: float
    workers: int


@functools.cache
def torch_tests() -> type[unittest.TestCase]:
    """The class of torch's tests, whose ranks are forked and need no GPU."""
    # the module reads some of these at import; threads do not survive a fork
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), TEMP_DIR=tempfile.gettempdir())
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    from torch.testing._internal import common_distributed as common

    for decorator in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu"):
        setattr(common, decorator, lambda *_, **__: lambda test: test)
    common.skip_if_no_gpu = lambda test: test
    common.init_multigpu_helper = lambda *_: {rank: [rank] for rank in range(RANKS)}
    from torch.testing._internal.distributed import distributed_test as suite

    class TorchTests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]  # torch types it not
            self._start_processes(FORK.Process)

    return TorchTests


def prepare() -> None:
    """Import modules that every run needs, and let Dynamo read the long test file, before the first fork."""
    torch_tests()
    import torch
    from torch._dynamo import trace_rules
    from torch.hub import tqdm  # type: ignore[attr-defined]  # not exported by name
    from torch.testing._internal.distributed import distributed_test as suite

    import ddpopt

    importlib.import_module("ci.torch_ddp.patches")
    # Dynamo skips functions in torch.testing, so the models of the tests would not be compiled.
    trace_rules.LEGACY_MOD_INLINELIST.add(suite.__name__)
    trace_rules.get_legacy_mod_inlinelist.cache_clear()
    tqdm.monitor_interval = 0  # it would start a thread
    inputs = torch.ones(10, 10)
    ddpopt.plan(suite.TwoLinLayerNet(), inputs)
    first, second = torch.compile(suite.TwoLinLayerNet(), backend="aot_eager")(inputs)
    torch.autograd.backward(first.sum() + second.sum())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    gc.freeze()  # otherwise garbage collection in each run would copy all of this memory
    if threading.active_count() > 1:
        raise RuntimeError(f"expected one thread before the first fork, got {threading.enumerate()!r}")


def run_all(
    names: Sequence[str], caps: Sequence[bool], modes: Sequence[str], settings: Settings
) -> dict[Job, Outcome]:
    """Run tests in eager and, where that passes, compiled.

    Args:
        names: names of the tests.
        caps: for each pass, whether it uses the small cap.
        modes: the ways to compile.
        settings: how to run.

    Returns:
        How each run ended.
    """
    waiting = [Job(name, EAGER, small) for small in caps for name in names]
    running, outcomes = list[_Running](), dict[Job, Outcome]()
    while waiting or running:
        while waiting and len(running) < settings.workers:
            running.append(_start(waiting.pop(0), settings.backend))
        time.sleep(POLL_S)
        for one in list(running):
            job = one.job
            outcome = _ended(one, settings.limit_s * (EAGER_SHARE if job.mode == EAGER else 1))
            if outcome is None:
                continue
            running.remove(one)
            outcomes[job] = outcome
            if outcome.ending in ("failed", "timed out"):
                print(f"{outcome.ending}: {job.test}, {job.mode}{', small cap' * job.small}", flush=True)
            if job.mode == EAGER and outcome.judges:
                waiting[:0] = [replace(job, mode=mode) for mode in modes]
    return outcomes


@dataclass(frozen=True)
class _Running:
    job: Job
    process: BaseProcess
    folder: tempfile.TemporaryDirectory[str]
    began: float


def _start(job: Job, backend: str) -> _Running:
    folder = tempfile.TemporaryDirectory(prefix="torch-ddp-")
    process = FORK.Process(target=_run, args=(job, backend, Path(folder.name)))
    process.start()
    return _Running(job, process, folder, time.monotonic())


def _run(job: Job, backend: str, folder: Path) -> None:
    """Run one test. This process waits for the ranks, which are forked from it and are in its group."""
    from ci.torch_ddp.patches import compile_ddp, stand_in_for_gpus

    os.setsid()
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    result = unittest.TestResult()
    try:
        stand_in_for_gpus()
        compile_ddp(job, backend, SMALL_CAP_MB, folder)
        torch_tests()(job.test).run(result)
        # unittest ends each text with how to run the test alone, which does not apply here
        texts = [text for _, text in [*result.errors, *result.failures, *result.skipped]]
        problems = [text.partition("\n\nTo execute this")[0] for text in texts]
    except BaseException:
        problems = [traceback.format_exc()]
    ending: Ending = "skipped" if result.skipped else "failed" if problems else "passed"
    (folder / "ending").write_text(json.dumps([ending, "\n".join(problems)[-KEPT_CHARACTERS:]]))


def _ended(running: _Running, limit_s: float) -> Outcome | None:
    """How a run ended, if it has ended or its time is over; then none of its processes is left."""
    from ci.torch_ddp.patches import BUILDS, GRAPHS

    seconds = time.monotonic() - running.began
    if running.process.is_alive() and seconds < limit_s:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid or 0, signal.SIGKILL)
    running.process.join()
    with running.folder as name:
        folder = Path(name)
        ending: Any = "timed out" if seconds >= limit_s else "failed"
        message = f"ended after {seconds:.0f} s with exit code {running.process.exitcode}, and no result"
        if (folder / "ending").exists():
            ending, message = json.loads((folder / "ending").read_text())
        builds, graphs = (folder / BUILDS).exists(), (folder / GRAPHS).exists()
    return Outcome(ending, builds, graphs, round(seconds, 2), message)
