"""How a trial ends: which backends are compared bit for bit, and which status a finished run has.

Invariant: a run is ok only if something was judged, and all that should have been judged was.
"""

from collections.abc import Callable, Sequence
from typing import Any, get_args

from ddpopt.judge.compare import dense
from ddpopt.judge.engines.engine import Engine, Gives
from ddpopt.judge.rules.failing import Failure, own_of, told
from ddpopt.judge.training.record import Record
from ddpopt.judge.training.trainer import Option
from ddpopt.judge.verdict import Finding, Status

EXACT = ("eager", "aot_eager")
"""Backends that run the operations of eager, in its order."""

GIVES = get_args(Gives)
"""In ascending order: each offers more than the one before."""
JUDGE_FAILED = "the judge itself failed, so nothing was learned; please report this"
NO_GRADIENTS = (
    "nothing was judged: in eager DDP, no parameter gets a finite gradient. Make sure that a parameter is "
    "trained, and look for the source of NaN or infinity"
)


def has_option(mode: Engine, option: Option) -> bool:
    """Whether a mode offers what an option needs."""
    return GIVES.index(option.needs) <= GIVES.index(mode.gives)


def is_exact(mode: Engine, option: Option, backend: Any) -> bool:
    """Whether a mode computes what eager computes bit for bit, by default."""
    runs_as_eager = backend is None or (backend in EXACT and option.computes is None)
    return mode.exact and runs_as_eager


def ended(found: Sequence[Finding], judged_any: bool, unjudged: Sequence[str]) -> dict[str, Any]:
    """The status of a trial whose run was compared, and the reason."""
    if found:
        return {"status": Status.WRONG}
    if not judged_any:
        return {"status": Status.NOT_POSSIBLE, "reason": NO_GRADIENTS}
    if unjudged:
        return {"status": Status.BROKEN, "reason": f"not judged in full: {'; '.join(unjudged)}"}
    return {"status": Status.OK}


def without_reference(failures: Sequence[Failure], stalled: str = "") -> dict[str, Any]:
    """The status of a trial for which eager DDP gives no reference, and the reason; arguments as `failed`."""
    if stalled:
        return {"status": Status.BROKEN, "reason": f"eager DDP's own runs did not finish: {stalled}"}
    own = own_of(failures)
    texts = "; ".join(dict.fromkeys(failure.text for failure in own))
    if any(failure.of_judge for failure in own):
        return {"status": Status.BROKEN, "reason": f"{JUDGE_FAILED}: {texts}"}
    return {"status": Status.NOT_POSSIBLE, "reason": f"eager DDP itself fails here: {texts}"}


def failed(
    failures: Sequence[Failure],
    stalled: str = "",
    *,
    ranks_differ: bool = True,
    remark: Callable[[], str] = lambda: "",
) -> dict[str, Any]:
    """The status of a trial whose run failed where eager DDP runs, and the findings or the reason.

    Args:
        failures: of all ranks on which it failed.
        stalled: how it failed only because of a time limit; empty if it did not.
        ranks_differ: whether ranks may run different graphs; what is refused only then is wrong elsewhere.
        remark: adds to a finding; called only if there is one.
    """
    if stalled:
        return {"status": Status.BROKEN, "reason": stalled}
    own = own_of(failures)
    if any(failure.of_judge for failure in own):
        return {"status": Status.BROKEN, "reason": f"{JUDGE_FAILED}: {told(own)}"}
    if all(failure.refused and (ranks_differ or not failure.if_ranks_differ) for failure in own):
        return {"status": Status.REFUSED, "reason": told(own)}
    more = remark()
    findings = (Finding("run", "the step runs", f"{_where(each)}{more}", rank=each.rank) for each in own)
    return {"status": Status.WRONG, "findings": tuple(findings)}


def _where(failure: Failure) -> str:
    return f"extra step: {failure.extra}: {failure.text}" if failure.extra else failure.text


def has_gradients(eager: Record) -> bool:
    """Whether there is a gradient with a number in it."""
    gradients = (gradient for step in eager.steps for gradient in step.gradients.values())
    return any(bool(dense(gradient).isfinite().any()) for gradient in gradients if gradient is not None)
