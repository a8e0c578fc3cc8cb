"""Where compile time went: by phase, and by the piece that was compiled.

Dynamo's timers nest, so each phase is what is left of one timer without those inside of it. A backward is
often compiled only when it first runs; backwards then come in the reverse order of their forwards, for
autograd runs the node that was made last first.

Invariant: the phases of a mode do not overlap, and add up to all of Dynamo's compile time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpopt.doctor.diagnosis import CompileTime, Finding, SegmentTime, Weight
from ddpopt.doctor.dynamo import Frame, Notes
from ddpopt.doctor.trial import OURS, TORCH, Trial
from ddpopt.explanation.result import Explanation

_IN_BACKEND = "OutputGraph.call_user_compiler"
_IN_AOTAUTOGRAD = "create_aot_dispatcher_function"
_WORTH_A_WORD_S = 5.0
"""Less than this is no reason to change anything."""


def compile_time(trial: Trial, explanation: Explanation | None) -> CompileTime:
    """Divide one trial's compile time.

    Args:
        trial: one that was compiled.
        explanation: the prediction of segments; None if there is none.

    Returns:
        Its phases and its pieces.
    """
    notes = trial.notes
    pieces = _pieces(notes, _labels(trial, explanation))
    return CompileTime(trial.mode, notes.graphs, tuple(_phases(notes)), pieces, failed=bool(trial.failure))


def time_findings(times: Sequence[CompileTime]) -> Iterator[Finding]:
    """What stands out."""
    by_mode = {time.mode: time for time in times if not time.failed}
    if TORCH not in by_mode or OURS not in by_mode:
        return
    theirs, ours = by_mode[TORCH], by_mode[OURS]
    if theirs.total_s > 1.5 * ours.total_s and theirs.total_s > _WORTH_A_WORD_S:
        yield Finding(
            "compile time",
            Weight.SLOW,
            f"torch's optimizer compiles {len(theirs.segments)} pieces in {theirs.total_s:.1f} s, ddpopt "
            f"{len(ours.segments)} in {ours.total_s:.1f} s, both from empty caches.",
            "Compile with ddpopt.compile(ddp) in place of torch.compile(ddp).",
        )


def _phases(notes: Notes) -> Iterator[tuple[str, float]]:
    forward = [frame for frame in notes.frames if not frame.backward]
    own = [frame for frame in forward if frame.is_ddps]
    model = [frame for frame in forward if not frame.is_ddps]
    backend = _sum(notes, _IN_BACKEND)
    aot = _sum(notes, _IN_AOTAUTOGRAD)
    inductor = sum(frame.inductor_s for frame in forward)
    backward = [frame for frame in notes.frames if frame.backward]
    phases = (
        ("Dynamo, frames of DDP itself", _in_dynamo(own)),
        ("Dynamo, the model", _in_dynamo(model)),
        ("backend: cutting, passes, its own work", backend - aot),
        ("AOTAutograd", aot - inductor),
        ("Inductor, with the forward", inductor),
        ("backward, when it first ran", sum(frame.total_s for frame in backward)),
    )
    yield from ((name, max(seconds, 0.0)) for name, seconds in phases if seconds > 0)


def _in_dynamo(frames: Sequence[Frame]) -> float:
    return sum(frame.total_s - frame.backend_s for frame in frames)


def _sum(notes: Notes, timer: str) -> float:
    return sum(notes.seconds.get(timer, []))


def _labels(trial: Trial, explanation: Explanation | None) -> list[tuple[str, ...]]:
    """For each distinct segment that is expected, the parameters that it completes."""
    if explanation is None or trial.inline:
        return []
    if trial.mode == TORCH:
        return [segment.params for segment in explanation.torch.segments if not segment.reused]
    return [segment.params for segment in explanation.plan.segments]


def _pieces(notes: Notes, labels: Sequence[tuple[str, ...]]) -> tuple[SegmentTime, ...]:
    forward = notes.seconds.get(_IN_AOTAUTOGRAD) or notes.seconds.get(_IN_BACKEND, [])
    backward = [frame.total_s for frame in notes.frames if frame.backward]
    later: Sequence[float | None] = backward[::-1] if len(backward) == len(forward) else [None] * len(forward)
    params = labels if len(labels) == len(forward) else [()] * len(forward)
    pieces = zip(forward, later, params, strict=True)
    return tuple(SegmentTime(index, *piece) for index, piece in enumerate(pieces))
