"""What ranks do in a verification: run eager DDP, and judge one mode after the other against it.

Invariant: all ranks judge the same trials in the same order.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo import guards, trace_rules
from torch._functorch._aot_autograd import graph_compile

from ddpopt.cases.case import Case, resolve
from ddpopt.judge.judge import judge
from ddpopt.judge.judging.failing import culprits, told
from ddpopt.judge.judging.reference import Bench, Reference, Subject
from ddpopt.judge.modes import mode
from ddpopt.judge.option_cases import in_dtype
from ddpopt.judge.options import option
from ddpopt.judge.parallel import nothing
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.group import COLLECTIVE_LIMIT_S, Ranks
from ddpopt.ranks.process import RankProcess

STEPS = 3
"""DDP rebuilds its buckets before the second step; the third is the first that all has settled in."""
TRIAL_LIMIT_S = 300.0
COLLECTIVE_SHARE = 0.8
"""Of a trial's limit: a rank may wait for a peer that compiles for most of it, and has yet to say so."""


@dataclass(frozen=True)
class Asked:
    """One thing to verify: a case under an option, and the modes to judge there.

    Attributes:
        target: names the case in other processes, or is it.
        option: name of the option.
        modes: names of the modes.
    """

    target: str | Case
    option: str
    modes: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """What holds for all trials of a verification.

    Attributes:
        backend: of Dynamo: a name, or a callable.
        steps: how many steps of training.
        dtype: name of the dtype to compute in; None for the case's own.
        trial_limit_s: limit of one trial, and of eager's runs before the first one, in seconds.
    """

    backend: Any = "inductor"
    steps: int = STEPS
    dtype: str | None = None
    trial_limit_s: float = TRIAL_LIMIT_S

    @property
    def collective_limit_s(self) -> float:
        """How long a rank waits for its peers, in seconds."""
        return COLLECTIVE_SHARE * self.trial_limit_s

    @property
    def waits_s(self) -> float:
        """How long ranks wait for each other between trials: a trial's own limit passes before."""
        return max(COLLECTIVE_LIMIT_S, self.trial_limit_s)


@dataclass(frozen=True)
class Started:
    """An event: a trial begins.

    Attributes:
        case: name of its case.
        option: name of its option.
        mode: name of its mode.
    """

    case: str
    option: str
    mode: str


@dataclass(frozen=True)
class Ended:
    """An event: a trial has ended.

    Attributes:
        trial: how.
    """

    trial: Trial


class Judging:
    """Ranks that judge trials, with eager's runs made once for each case and option.

    Args:
        ranks: these.
        asked: what may be asked of them.
        settings: for all of it.
        before_each: something to do before each case and option.
    """

    def __init__(
        self,
        ranks: Ranks,
        asked: Sequence[Asked],
        settings: Settings,
        before_each: Callable[[], None] = nothing,
    ) -> None:
        self.ranks = ranks
        self._asked = asked
        self._settings = settings
        self._before_each = before_each
        self._cases: dict[int, Case] = {}
        self._place: int | None = None
        self._benches = contextlib.ExitStack()

    def close(self) -> None:
        """Give process groups back."""
        self._place = None
        self._benches.close()

    def begin(self, place: int) -> tuple[str, str]:
        """Name the case that is asked for in a place, and what this rank computes on."""
        return self._case(place).name, hardware(self.ranks.device)

    def prepare(self, place: int) -> None:
        """Run eager DDP for what is asked in a place, unless that is what it did last."""
        if place == self._place:
            return
        self.close()
        self._before_each()
        case, asked, settings = self._case(place), self._asked[place], self._settings
        subject = Subject(case, option(asked.option), settings.steps, self.ranks.device)
        with self.ranks.limited(settings.trial_limit_s, f"{case.name}: eager DDP / {asked.option}"):
            self._bench = Bench(subject, self.ranks, settings.collective_limit_s)
            self._benches.callback(self._bench.close)
            self._reference = Reference.make(self._bench)
        self._place = place

    def judge(self, place: int, name: str) -> Trial:
        """Judge a mode of what was prepared."""
        case, asked, settings = self._case(place), self._asked[place], self._settings
        with self.ranks.limited(settings.trial_limit_s, f"{case.name}: {name} / {asked.option}"):
            if self._reference is None:
                return _impossible(case, asked.option, name, self._bench)
            return judge(self._reference, mode(name), settings.backend)

    def _case(self, place: int) -> Case:
        if place not in self._cases:
            case, dtype = resolve(self._asked[place].target), self._settings.dtype
            self._cases[place] = case if dtype is None else in_dtype(case, getattr(torch, dtype))
        return self._cases[place]


def host(process: RankProcess, asked: Sequence[Asked], settings: Settings) -> None:
    """Be a rank of a pool whose tasks are methods of `Judging`, all in one process group."""
    # in a process of our own, whose garbage each run of the collector would look through
    with (
        quickly(),
        process.joined(settings.waits_s) as ranks,
        contextlib.closing(Judging(ranks, asked, settings, keep_for_good)) as judging,
    ):
        process.serve(lambda _: contextlib.nullcontext(judging))


def hardware(device: torch.device) -> str:
    """Name what a rank computes on.

    Args:
        device: of the rank.

    Returns:
        ``"cpu"``, or ``"cuda"`` with the name of the GPU.
    """
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Spare a process of our own what costs a third of a trial and what nobody reads.

    What is imported by now is no garbage; each run collects its own. Dynamo does not time its guards, puts
    together no structured trace, and keeps its table of torch's functions when a process group is made.
    AOTAutograd writes its graphs down only for who set ``TORCH_LOGS``.
    """
    _load_compiler()
    keep_for_good()
    spared: list[tuple[Any, str, Any]] = [
        (logging.getLogger("torch.__trace"), "handlers", []),
        (guards, "profile_guard_manager", lambda *_: 0.0),
        (trace_rules, "clear_lru_cache", nothing),
    ]
    if not os.environ.get("TORCH_LOGS"):
        spared += [
            (graph_compile, "_log_joint_graph", lambda *_: None),
            (graph_compile, "_log_fw_bw_graphs", lambda *_: (None, None)),
        ]
    with contextlib.ExitStack() as stack:
        for where, name, instead in spared:  # a release that does not do it has no such name
            stack.enter_context(patch.object(where, name, instead, create=True))
        yield


def keep_for_good() -> None:
    """Have the garbage collector look no more at what is there: modules, caches of Dynamo's."""
    gc.collect()
    gc.freeze()


def _load_compiler() -> None:
    """Import what the first compilation imports: it is no garbage either."""
    compiled = torch.compile(lambda x: x * 2, backend="aot_eager")
    compiled(torch.ones(2, requires_grad=True)).sum().backward()


def _impossible(case: Case, option_name: str, mode_name: str, bench: Bench) -> Trial:
    """Of a mode that has nothing to be held against."""
    if bench.stalled:
        reason = f"eager DDP's own runs did not end: {bench.stalled}"
        return Trial(case.name, mode_name, option_name, "", Status.BROKEN, reason)
    reason = f"eager DDP itself fails here: {told(culprits(bench.failures))}"
    return Trial(case.name, mode_name, option_name, "", Status.NOT_POSSIBLE, reason)
