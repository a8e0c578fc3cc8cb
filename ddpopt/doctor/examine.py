"""Examine a case: run it in eager, in eager DDP, with torch's optimizer and with ddpopt; report findings.

Invariant: every claim of a finding was observed in one of these runs, or predicted by `ddpopt.explain` and
labeled as a prediction.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ddpopt.cases.case import Case
from ddpopt.doctor.breaks import break_findings
from ddpopt.doctor.causes import NOT_COMPILED, WAITS_IN_VAIN, causes_first
from ddpopt.doctor.diagnosis import Advice, Diagnosis, Weight
from ddpopt.doctor.dynamo import without_logs_of_torch
from ddpopt.doctor.mode_run import EAGER, OURS, TORCH, ModeRun, run_mode
from ddpopt.doctor.options import option_findings
from ddpopt.doctor.parameters import find_unused, unused_findings
from ddpopt.doctor.recompiles import recompile_findings
from ddpopt.dynamo.backend import find_compiler
from ddpopt.dynamo.backends import backend_of
from ddpopt.errors import UsageError
from ddpopt.explanation.explain import explain_case
from ddpopt.explanation.rehearsal import generators_kept
from ddpopt.explanation.result import Explanation
from ddpopt.planning.limits import BucketConfig
from ddpopt.ranks.group import one_rank
from ddpopt.terminal.tables import MIB, names
from ddpopt.torch_private import require_supported

USE_DDPOPT = "Compile with ddpopt.compile(ddp) instead of torch.compile(ddp)"


def diagnose(
    case: Case,
    ddp_kwargs: Mapping[str, Any] | None = None,
    *,
    backend: str = "inductor",
    steps: int = 3,
    ranks: int = 2,
    tell: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Run a case for a few steps in each mode, and say what prevents overlap.

    The default process group is used if there is one; otherwise a temporary group of this process alone is
    made. Functions that this process has compiled before will be compiled again.

    Args:
        case: the case.
        ddp_kwargs: DDP's arguments, replacing the case's own.
        backend: a Dynamo backend: its name, or ``package.module:function``.
        steps: the number of steps of each mode, at least 2: DDP rebuilds its buckets before the second.
        ranks: the number of ranks whose inputs are tried for unused parameters.
        tell: called with progress messages, because a run may take minutes.

    Returns:
        The diagnosis.

    Raises:
        UsageError: an argument cannot be used, or torch lacks a name that ddpopt uses.
        NotJudgedError: the model fails in eager, without DDP.
    """
    kwargs = dict(case.ddp_kwargs if ddp_kwargs is None else ddp_kwargs)
    _require_usable(kwargs, steps, ranks)
    compiler = find_compiler(backend_of(backend))
    unused = find_unused(case, ranks, steps, tell)
    with without_logs_of_torch():
        explanation, untraced = _explain(case, kwargs)
    with generators_kept(), one_rank(), without_logs_of_torch():
        eager, *compiled = _runs(case, kwargs, compiler, steps, tell)
        model = case.model()
        ignored = tuple(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        findings = (
            *_run_findings(eager, compiled),
            *_of_the_model([eager, *compiled]),
            *_split_findings(compiled, explanation, untraced),
            *unused_findings(unused, ignored, kwargs, steps),
            *option_findings(model, None if eager.failure else len(eager.buckets)),
        )
    return Diagnosis(
        case=case.name,
        model=type(model).__name__,
        backend=backend,
        steps=steps,
        ranks=ranks,
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        findings=causes_first(findings),
        buckets={run.mode: run.buckets for run in compiled if not run.failure},
        unused=unused,
    )


def _require_usable(ddp_kwargs: Mapping[str, Any], steps: int, ranks: int) -> None:
    require_supported()
    BucketConfig.from_kwargs(**ddp_kwargs)
    if steps < 2:
        raise UsageError(
            f"steps: expected at least 2, because DDP rebuilds its buckets before the second, got {steps!r}"
        )
    if ranks < 1:
        raise UsageError(f"nproc: expected at least 1, got {ranks!r}")


def _explain(case: Case, ddp_kwargs: Mapping[str, Any]) -> tuple[Explanation | None, str]:
    try:
        return explain_case(case, ddp_kwargs), ""
    except UsageError as error:  # a model may run, but not on fake tensors
        return None, str(error).partition("\n")[0]


def _runs(
    case: Case, ddp_kwargs: Mapping[str, Any], compiler: Any, steps: int, tell: Callable[[str], None]
) -> Iterator[ModeRun]:
    tell(EAGER)
    eager = run_mode(case, EAGER, ddp_kwargs, compiler, steps)
    yield eager
    if eager.failure and not _waits_in_vain(eager):
        return
    searching = {"find_unused_parameters": True, "static_graph": False} if eager.failure else {}
    for mode in (TORCH, OURS):
        tell(mode)
        yield run_mode(case, mode, {**ddp_kwargs, **searching}, compiler, steps)


def _waits_in_vain(eager: ModeRun) -> bool:
    """Whether DDP complains about parameters without a gradient; its other options may still work."""
    return "Expected to have finished reduction in the prior iteration" in eager.failure


def _of_the_model(runs: Sequence[ModeRun]) -> Iterator[Advice]:
    """Breaks and recompiles of the last run that finished, because it saw every step."""
    whole = [run for run in runs[1:] if not run.failure]
    notes = (whole or list(runs))[-1].notes
    yield from break_findings(notes)
    yield from recompile_findings(notes)


def _run_findings(eager: ModeRun, compiled: Sequence[ModeRun]) -> Iterator[Advice]:
    if eager.failure:
        yield _eager_failed(eager)
    for run in compiled:
        if run.failure:
            yield _compiled_failed(run, other_runs=any(not other.failure for other in compiled))
        elif run.notes.graphs == 0:
            yield Advice(
                "run",
                Weight.SLOW,
                f"Under {run.mode} {NOT_COMPILED}: it runs in eager.",
                "Dynamo skips the module's frames (pytorch#140416): compile with ddpopt.compile(ddp), or "
                "wrap the module in one of your own.",
            )


def _eager_failed(eager: ModeRun) -> Advice:
    what = f"Eager DDP fails in step {eager.failed_step}"
    if _waits_in_vain(eager):
        what += (
            f", {WAITS_IN_VAIN} in the previous step. The compiled modes were run "
            "with find_unused_parameters=True."
        )
        return Advice("run", Weight.WRONG, what, "See the finding on parameters.")
    what += f": {eager.failure} No compiled mode was run."
    return Advice("run", Weight.WRONG, what, "Make eager DDP run first.")


def _compiled_failed(run: ModeRun, *, other_runs: bool) -> Advice:
    what = f"Under {run.mode} step {run.failed_step} fails: {run.failure}"
    if run.mode == OURS:
        instead = " Until then compile with torch.compile(ddp)." if other_runs else ""
        step = f"Please report this to ddpopt, with the model.{instead}"
    else:
        instead = "Compile with ddpopt.compile(ddp); or set" if other_runs else "Set"
        step = f"{instead} torch._dynamo.config.optimize_ddp = False, without overlap."
    return Advice("run", Weight.WRONG, what, step)


def _split_findings(
    compiled: Sequence[ModeRun], explanation: Explanation | None, untraced: str
) -> Iterator[Advice]:
    """The predicted cost of the cuts of torch's optimizer."""
    if explanation is None:
        step = "None: everything else in this report was observed in real runs."
        what = f"The segments are unknown, because they are predicted on fake tensors: {untraced}"
        yield Advice("run", Weight.NOTE, what, step)
        return
    ran = {run.mode for run in compiled if not run.failure and run.notes.graphs}
    sent = sum(bucket.nbytes for bucket in explanation.plan.buckets)
    if ran >= {TORCH, OURS} and len(explanation.plan.buckets) > 1 and sent > MIB:
        waits = _waits(explanation)
        if waits:
            what = f"Under {TORCH} {waits}"
            yield Advice("buckets", Weight.SLOW, what, f"{USE_DDPOPT}: each bucket leaves when it is full.")
    unread = set(explanation.plan.unread)
    unseen = [name for name in explanation.torch.unseen if name not in unread]
    if unseen and explanation.torch.segments:
        yield Advice(
            "buckets",
            Weight.SLOW,
            f"torch's optimizer does not see {names(unseen)}: it looks at the positional arguments of each "
            "operation, not at keyword arguments or inside lists. It makes no cut for them.",
            f"{USE_DDPOPT}; or pass these weights as positional arguments.",
        )


def _waits(explanation: Explanation) -> str:
    """How buckets wait under torch's optimizer; empty if none waits longer than necessary."""
    theirs = explanation.torch_tally
    count = theirs.buckets
    if theirs.segments == 1:
        return "the graph is one segment, so all gradients arrive when its backward ends."
    if count == 1:
        return "all gradients are one bucket, which leaves when the last of them is ready."
    if theirs.early == 0:
        return (
            f"none of {count} buckets can leave before the last of {theirs.segments} segments has run its "
            "backward, so no all-reduce overlaps with backward."
        )
    if theirs.spread:
        return (
            f"{theirs.spread} of {count} buckets wait for more than one of {theirs.segments} segments; "
            f"{theirs.early} of {count} can leave before the last segment's backward."
        )
    return ""
