"""Frames of the model that Dynamo recompiled, with the guard that failed and how to avoid that.

DDP's own wrapper recompiles together with the model; only the model's frames are shown.

Invariant: every compilation that replaced an earlier one is counted in one finding.
"""

import re
from collections.abc import Iterator, Sequence

from ddpopt.doctor.diagnosis import Advice, Weight
from ddpopt.doctor.dynamo import Frame, Notes

_RESUMED = re.compile(r"^torch_dynamo_resume_in_(\w+)_at_(\d+)$")
_SIZE = re.compile(r"tensor '(?P<name>.+?)' size mismatch at index (?P<dim>\d+)")
_OWNED = re.compile(r"\b[A-Za-z_]\w*\.[A-Za-z_]")
_DYNAMIC = (
    "Mark that dimension, or that of the input it comes from, before the first call: "
    "torch._dynamo.mark_dynamic({name}, {dim}), pass dynamic=True to torch.compile, or pad inputs to a few "
    "fixed sizes."
)
_STEPS = (
    ("dtype mismatch", "Cast inputs to one dtype before they reach the model."),
    ("stride mismatch", "Give inputs the same memory layout in every step, for instance with .contiguous()."),
    ("requires_grad mismatch", "Call it with the same kind of tensors: set requires_grad on the first "
     "input too, or do not freeze parameters between calls."),
    ("device mismatch", "Move inputs to the model's device before the call."),
    ("rank mismatch", "Give inputs the same number of dimensions in every step."),
    ("GLOBAL_STATE", "Grad mode, autocast or determinism changed between steps: set each once, or run "
     "evaluation through a function that is compiled separately."),
    ("grad_mode", "Run evaluation through a function that is compiled separately."),
    ("Duplicate tensor", "Pass distinct tensors in every step, or the same aliases in every step."),
    ("___check_obj_id", "An object that the model reads was replaced: create it once and keep it."),
    ("___check_type_id", "A value that the model reads changed type: give it the same type in every step."),
    ("___stack", "The value was made before a graph break and is used after it: remove the break."),
    ("recompile_limit", "Raise torch._dynamo.config.recompile_limit only if there are few variants."),
)  # fmt: skip
_ATTRIBUTE = (
    "An attribute that the model reads changed. Keep it constant, or make it a tensor (a buffer); for an "
    "int, see torch._dynamo.config.allow_unspec_int_on_nn_module."
)
_ARGUMENT = (
    "A Python value that is passed to the model changed. Pass it as a tensor, or keep it constant; where "
    "the model branches on it, each branch is compiled once."
)


def recompile_findings(notes: Notes) -> Iterator[Advice]:
    """Return one finding for each function of the model and each guard that failed in one trial.

    Args:
        notes: Dynamo's records of the trial.
    """
    groups: dict[tuple[str, int, str], list[Frame]] = {}
    for frame in notes.frames:
        if frame.recompiled and not frame.is_ddps:
            guard = re.sub(r"\d+", "#", _guard(frame.recompiled)[0])
            groups.setdefault((frame.file, frame.line, guard), []).append(frame)
    yield from map(_finding, groups.values())


def _finding(same: Sequence[Frame]) -> Advice:
    first = same[0]
    last = max(frame.step for frame in same)
    guard, read_by = _guard(first.recompiled)
    times = "once" if len(same) == 1 else f"{len(same)} times"
    seconds = sum(frame.total_s for frame in same)
    when = "in the first step" if last == 0 else f"most recently in step {last}"
    what = (
        f"{_function(first.function)} ({first.file}:{first.line}) was recompiled {times}, {when}, which "
        f"took {seconds:.1f} s, because this guard failed: {guard}."
    )
    weight = Weight.SLOW
    cost = "While one rank compiles, all others wait for it in their next all-reduce."
    if last == 0 and len(same) == 1:
        weight = Weight.NOTE
        cost = "It is called in two ways in every step; the second compilation serves all later steps."
    line = f" The line: {read_by}" if read_by else ""
    resumed = _RESUMED.match(first.function)
    place = f"{first.file}:{resumed[2]}" if resumed else ""
    return Advice("recompile", weight, f"{what} {cost}{line}", step_for(guard), place)


def step_for(guard: str) -> str:
    """Return the step that keeps a guard from failing.

    >>> step_for("tensor 'x' dtype mismatch. expected Float, actual Half")
    'Cast inputs to one dtype before they reach the model.'
    """
    size = _SIZE.search(guard)
    if size:
        return _DYNAMIC.format(**size.groupdict())
    return next(
        (step for part, step in _STEPS if part in guard), _ATTRIBUTE if _OWNED.search(guard) else _ARGUMENT
    )


def _guard(reason: str) -> tuple[str, str]:
    """The guard without the compile id before it, and the line of the model in the comment after it.

    >>> _guard("0/0: n == 3                # x = x * n  # model.py:7 in forward")
    ('n == 3', 'x = x * n')
    """
    guard, *comments = re.split(r"\s+# ", reason.partition("\n")[0])
    return re.sub(r"^\d+/\d+: ", "", guard).strip(), comments[0].strip() if len(comments) > 1 else ""


def _function(name: str) -> str:
    resumed = _RESUMED.match(name)
    return f"{resumed[1]}, after the graph break at line {resumed[2]}," if resumed else f"{name}()"
