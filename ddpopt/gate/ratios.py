"""Planning and compile time as shares of what torch's DDPOptimizer takes, in the same process.

Both take turns, and the fastest of each counts: a busy machine only ever adds. What is counted is processor
time and no clock on the wall, that of compilers that Inductor starts included.

Invariant: where torch's optimizer fails, or nothing is compiled, there is a word in place of a number.
"""

from __future__ import annotations

import contextlib
import gc
import math
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.nn.parallel import DistributedDataParallel

from ddpopt.cases.case import Case, step_seed
from ddpopt.dynamo.backend import DdpoptBackend
from ddpopt.gate.bands import PLANNING, Bands
from ddpopt.gate.figures import Ratio
from ddpopt.gate.runs import fresh_group
from ddpopt.judge.modes import Mode, Setup, mode
from ddpopt.judge.training import on_device
from ddpopt.ranks.group import Ranks

ROUNDS = 3
"""How often each is timed."""
MORE_ROUNDS = 9
"""How often at most, while a ratio is out of its band."""
DIGITS = 3
FIRST_BUCKET_BYTES = 2**20
"""The first bucket's cap, which DDP has by default and torch's optimizer always."""
NOT_TIMED = math.inf
Optimize = Callable[[DistributedDataParallel, fx.GraphModule, Sequence[Any]], object]


@dataclass
class _Timed:
    """One ratio: what is ours, what is torch's, and the fastest of each so far."""

    ours: Callable[[], float]
    theirs: Callable[[], float]
    fastest: list[float] = field(default_factory=lambda: [NOT_TIMED, NOT_TIMED])
    failure: str = ""
    """How torch's optimizer fails, if it does."""
    own_failure: str = ""

    def take_turns(self) -> None:
        """Time both once, unless one has failed."""
        if self.failure or self.own_failure:
            return
        try:
            self.fastest[0] = min(self.fastest[0], self.ours())
        except Exception as error:
            self.own_failure = f"{type(error).__name__}: {error}"
            return
        try:
            self.fastest[1] = min(self.fastest[1], self.theirs())
        except Exception as error:  # it has cases that it fails on
            self.failure = f"torch fails: {type(getattr(error, 'inner_exception', error)).__name__}"

    @property
    def ratio(self) -> Ratio:
        """Ours as a share of torch's."""
        if self.failure:
            return self.failure
        ours, theirs = self.fastest
        return round(ours / theirs, DIGITS) if theirs else "nothing to time"


def time_ratios(
    case: Case,
    modes: Sequence[str],
    backend: Any,
    ranks: Ranks,
    before: Mapping[str, Ratio],
    bands: Bands,
) -> tuple[dict[str, Ratio], dict[str, str]]:
    """Time planning, and the first step of each mode, against torch's DDPOptimizer.

    Args:
        case: what is planned and compiled.
        modes: of ddpopt's.
        backend: of Dynamo, for the first step: a name or a callable.
        ranks: a single one, so that nothing is waited for.
        before: the baseline's ratios. One that is above its band is timed again, up to `MORE_ROUNDS` times:
            a regression stays, a busy minute does not.
        bands: how far a ratio may stray.

    Returns:
        By what was timed (``"planning"``, ``"compile, ddpopt-inline"``, …) the ratio; and by the same how
        ddpopt failed, where it did.
    """

    def first_step(name: str) -> Callable[[], float]:
        return lambda: _first_step(case, name, backend, ranks)

    def planning(optimize: Optimize) -> Callable[[], float]:
        return lambda: _planning(case, optimize, ranks)

    timed = {PLANNING: _Timed(planning(_plan_ours), planning(_plan_theirs))}
    timed |= {f"compile, {name}": _Timed(first_step(name), first_step("torch")) for name in modes}
    for what, one in timed.items():
        for turn in range(MORE_ROUNDS):
            if turn >= ROUNDS and not _is_above(one.ratio, before.get(what), what, bands):
                break
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                one.take_turns()
    ratios = {what: one.ratio for what, one in timed.items() if not one.own_failure}
    return ratios, {what: one.own_failure for what, one in timed.items() if one.own_failure}


def _is_above(now: Ratio, before: Ratio | None, what: str, bands: Bands) -> bool:
    if isinstance(now, str) or isinstance(before, str) or before is None:
        return False
    return now > bands.highest_ratio(what, before)


def processor_seconds() -> float:
    """Processor time of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


# -------------------------------------------------------------------------------------------------- planning


def _do_nothing(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return gm.forward


def _plan_ours(_: DistributedDataParallel, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> object:
    return DdpoptBackend(_do_nothing, strategy="split")(gm, example_inputs)


def _plan_theirs(ddp: DistributedDataParallel, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> object:
    # as Dynamo makes it, but for caps below its first bucket's, on which it fails
    cap = ddp.bucket_bytes_cap
    optimizer: Any = DDPOptimizer(cap, _do_nothing, first_bucket_cap=min(cap, FIRST_BUCKET_BYTES))
    return optimizer.compile_fn(gm, list(example_inputs))


def _planning(case: Case, optimize: Optimize, ranks: Ranks) -> float:
    """All that an optimizer adds to compiling, over a backend that does nothing."""
    with mode("whole").running(), fresh_group() as group:
        return _plan_once(case, optimize, group, ranks)


def _plan_once(case: Case, optimize: Optimize, group: dist.ProcessGroup, ranks: Ranks) -> float:
    seconds: list[float] = []
    torch.manual_seed(step_seed(0, 0))
    model = case.model().to(ranks.device)
    ddp = DistributedDataParallel(model, process_group=group, **case.ddp_kwargs)

    def stopwatch(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gc.collect()  # else one optimizer pays for what the other left behind
        start = processor_seconds()
        optimize(ddp, gm, example_inputs)
        seconds.append(processor_seconds() - start)
        return gm.forward

    args, kwargs = on_device(case.inputs(0, 0), ranks.device)
    torch.compile(ddp, backend=stopwatch)(*args, **kwargs)
    return sum(seconds)


# ---------------------------------------------------------------------------------------------- compile time


def _first_step(case: Case, name: str, backend: Any, ranks: Ranks) -> float:
    """A mode's first forward and backward, with nothing taken from a cache."""
    how = mode(name)
    with how.running(), _without_caches(), fresh_group() as group:
        return _step_once(case, how, backend, group, ranks)


def _step_once(case: Case, how: Mode, backend: Any, group: dist.ProcessGroup, ranks: Ranks) -> float:
    torch.manual_seed(step_seed(0, 0))
    parallel = how.wrap(Setup(case.model().to(ranks.device), group, backend, case.ddp_kwargs))
    torch.manual_seed(step_seed(0, 0))
    args, kwargs = on_device(case.inputs(0, 0), ranks.device)
    gc.collect()
    start = processor_seconds()
    torch.autograd.backward(case.loss(parallel.call(*args, **kwargs)))
    return processor_seconds() - start


@contextlib.contextmanager
def _without_caches() -> Iterator[None]:
    """Inductor's caches left alone, and its compilers run one by one, where their time is counted."""
    with torch._inductor.config.patch({"force_disable_caches": True, "compile_threads": 1}):
        yield
