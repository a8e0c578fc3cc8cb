"""Examine a case: run it in eager, in eager DDP, under torch's optimizer and under ddpopt, and draw findings.

Invariant: everything that a finding claims was seen in one of these runs, or predicted by `ddpopt.explain`
and called so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from ddpopt.cases.case import Case
from ddpopt.doctor.alignment import align, alignment_findings, find_overcounted
from ddpopt.doctor.breaks import break_findings, find_breaks
from ddpopt.doctor.diagnosis import Diagnosis, Finding, Unused, Weight
from ddpopt.doctor.options import option_findings, read_settings
from ddpopt.doctor.parameters import find_unused, unused_findings
from ddpopt.doctor.recompiles import find_recompiles, recompile_findings
from ddpopt.doctor.timings import compile_time, time_findings
from ddpopt.doctor.trial import EAGER, OURS, TORCH, Trial, run_trial, warm_up
from ddpopt.errors import UsageError
from ddpopt.explanation.explain import explain_case
from ddpopt.explanation.generators import generators_kept
from ddpopt.explanation.result import Explanation
from ddpopt.planning.limits import BucketConfig
from ddpopt.ranks.group import one_rank


def diagnose(
    case: Case,
    ddp_kwargs: Mapping[str, Any] | None = None,
    *,
    backend: str = "inductor",
    steps: int = 3,
    ranks: int = 2,
    tell: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Run a case for a few steps in each mode, and say what is in the way of overlap.

    The default process group is used if there is one; else one of this process alone is made for the time.
    Functions that this process has compiled before will be compiled again.

    Args:
        case: the case.
        ddp_kwargs: DDP's arguments, in place of the case's own.
        backend: name of a Dynamo backend.
        steps: how many steps each mode runs, at least 2: DDP rebuilds its buckets before the second.
        ranks: the inputs of how many ranks to try for unused parameters.
        tell: told what goes on, for it may take minutes.

    Returns:
        The diagnosis.

    Raises:
        UsageError: an argument cannot be used.
        DdpoptError: the model fails in eager, without DDP.
    """
    kwargs = dict(case.ddp_kwargs if ddp_kwargs is None else ddp_kwargs)
    _require_usable(backend, steps, ranks, kwargs)
    unused = find_unused(case, ranks, steps, tell)
    explanation, untraced = _explain(case, kwargs)
    with generators_kept(), one_rank():
        tell(f"compile something small with {backend}")
        warm_up(backend)
        trials = tuple(_trials(case, kwargs, backend, steps, tell))
        return _draw_up(_Seen(case, kwargs, backend, steps, ranks, unused, explanation, untraced, trials))


@dataclass(frozen=True)
class _Seen:
    """All that was seen of a case."""

    case: Case
    ddp_kwargs: Mapping[str, Any]
    backend: str
    steps: int
    ranks: int
    unused: tuple[Unused, ...]
    explanation: Explanation | None
    untraced: str
    trials: tuple[Trial, ...]

    @property
    def eager(self) -> Trial:
        """The run without a compiler."""
        return self.trials[0]

    @property
    def compiled(self) -> tuple[Trial, ...]:
        """The compiled runs; empty if eager DDP failed."""
        return self.trials[1:]


def _require_usable(backend: str, steps: int, ranks: int, ddp_kwargs: Mapping[str, Any]) -> None:
    BucketConfig.from_kwargs(**ddp_kwargs)
    if steps < 2:
        raise UsageError(
            f"steps: expected at least 2, for DDP rebuilds its buckets before the second, got {steps!r}"
        )
    if ranks < 1:
        raise UsageError(f"ranks: expected at least 1, got {ranks!r}")
    try:
        lookup_backend(backend)
    except Exception as error:
        known = ", ".join(torch.compiler.list_backends(exclude_tags=()))
        raise UsageError(
            f"backend: expected the name of a Dynamo backend, got {backend!r}; known are {known}"
        ) from error


def _explain(case: Case, ddp_kwargs: Mapping[str, Any]) -> tuple[Explanation | None, str]:
    try:
        return explain_case(case, ddp_kwargs), ""
    except UsageError as error:  # a model may run, and yet not on fake tensors
        return None, str(error).partition("\n")[0]


def _trials(
    case: Case, ddp_kwargs: Mapping[str, Any], backend: str, steps: int, tell: Callable[[str], None]
) -> Iterator[Trial]:
    tell(EAGER)
    eager = run_trial(case, EAGER, ddp_kwargs, backend, steps)
    yield eager
    if eager.failure and not _waits_in_vain(eager):
        return
    searching = {"find_unused_parameters": True, "static_graph": False} if eager.failure else {}
    for mode in (TORCH, OURS):
        tell(f"{mode}, {backend}")
        yield run_trial(case, mode, {**ddp_kwargs, **searching}, backend, steps)


def _waits_in_vain(eager: Trial) -> bool:
    """Whether DDP complains of parameters without a gradient; its other options may well work."""
    return "Expected to have finished reduction in the prior iteration" in eager.failure


def _draw_up(seen: _Seen) -> Diagnosis:
    model = seen.case.model()
    breaks = find_breaks(_telling(seen).notes)
    recompiles = find_recompiles(_telling(seen).notes)
    times = tuple(compile_time(trial, seen.explanation) for trial in seen.compiled)
    alignments = tuple(align(trial, seen.explanation) for trial in seen.compiled if not trial.failure)
    overcounted = find_overcounted(model, seen.explanation)
    buckets = None if seen.eager.failure else len(seen.eager.buckets)
    findings = (
        *_run_findings(seen),
        *break_findings(breaks),
        *recompile_findings(recompiles),
        *alignment_findings(alignments, seen.explanation, overcounted),
        *unused_findings(seen.unused, _ignored(model), seen.ddp_kwargs, seen.steps),
        *option_findings(read_settings(model, seen.ddp_kwargs, buckets)),
        *time_findings(times),
    )
    order = list(Weight)
    return Diagnosis(
        case=seen.case.name,
        model=type(model).__name__,
        backend=seen.backend,
        steps=seen.steps,
        ranks=seen.ranks,
        world_size=dist.get_world_size(),
        torch_version=torch.__version__,
        findings=tuple(sorted(findings, key=lambda finding: order.index(finding.weight))),
        breaks=breaks,
        recompiles=recompiles,
        compile_times=times,
        alignments=alignments,
        unused=seen.unused,
        overcounted=overcounted,
    )


def _telling(seen: _Seen) -> Trial:
    """The trial to learn of the model from: the last one that ran to its end, for it saw every step."""
    whole = [trial for trial in seen.compiled if not trial.failure]
    return (whole or list(seen.trials))[-1]


def _ignored(model: nn.Module) -> tuple[str, ...]:
    return tuple(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def _run_findings(seen: _Seen) -> Iterator[Finding]:
    eager = seen.eager
    if eager.failure:
        yield _eager_failed(eager)
    for trial in seen.compiled:
        if trial.failure:
            other_runs = any(not other.failure for other in seen.compiled)
            yield _compiled_failed(trial, other_runs=other_runs)
        elif trial.notes.graphs == 0:
            yield _compiled_nothing(trial)
    if seen.untraced:
        yield Finding(
            "run",
            Weight.NOTE,
            f"Segments are not known, for they are predicted on fake tensors: {seen.untraced}",
            "None: all else in this report was seen in real runs.",
        )


def _eager_failed(eager: Trial) -> Finding:
    what = f"Eager DDP fails in step {eager.failed_step}"
    if _waits_in_vain(eager):
        return Finding(
            "run",
            Weight.WRONG,
            f"{what}, because parameters of the step before got no gradient. The compiled modes were run "
            "with find_unused_parameters=True.",
            "See the finding on parameters.",
        )
    return Finding(
        "run", Weight.WRONG, f"{what}: {eager.failure} No compiled mode was run.", "Make eager DDP run first."
    )


def _compiled_failed(trial: Trial, *, other_runs: bool) -> Finding:
    what = f"Under {trial.mode} step {trial.failed_step} fails: {trial.failure}"
    if trial.mode == OURS:
        instead = " Until then compile with torch.compile(ddp)." if other_runs else ""
        step = f"Please report this to ddpopt, with the model.{instead}"
    else:
        instead = "Compile with ddpopt.compile(ddp); or set" if other_runs else "Set"
        step = f"{instead} torch._dynamo.config.optimize_ddp = False, without overlap."
    return Finding("run", Weight.WRONG, what, step)


def _compiled_nothing(trial: Trial) -> Finding:
    return Finding(
        "run",
        Weight.SLOW,
        f"Under {trial.mode} nothing of the model is compiled: it runs in eager.",
        "See the graph breaks in this report; where there are none, Dynamo steps over the module's frames "
        "(pytorch#140416): compile with ddpopt.compile(ddp), or put the module into one of your own.",
    )
