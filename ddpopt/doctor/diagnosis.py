"""What the doctor finds, as data: findings with their next steps, and the evidence for each.

Invariant: frozen; the text depends on nothing but these fields.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from ddpopt.doctor.text import render
from ddpopt.errors import VerificationError

FORMAT = 1


class Weight(StrEnum):
    """How much a finding matters."""

    WRONG = "wrong"
    """The step fails, or would train something else."""
    SLOW = "slow"
    """It costs overlap or compile time."""
    NOTE = "note"
    """Worth knowing; nothing has to be done."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found, and what to do about it.

    Attributes:
        topic: ``"run"``, ``"graph break"``, ``"recompile"``, ``"compile time"``, ``"buckets"``,
            ``"parameters"`` or ``"options"``.
        weight: how much it matters.
        what: what is so, in sentences.
        step: the next step to take, in sentences.
    """

    topic: str
    weight: Weight
    what: str
    step: str


@dataclass(frozen=True)
class Break:
    """A place in the model where Dynamo ended a graph.

    Attributes:
        reason: Dynamo's title for it.
        explanation: Dynamo's own explanation.
        hints: what Dynamo says to do.
        link: page about this kind of break; empty if Dynamo names none.
        file: source file.
        line: line in it, from 1.
        code: that line, without indentation.
        abandons: the function whose frame Dynamo gave up because of it, so that it runs in eager; empty if
            it went on after the break.
        because: why it could not go on after the break; empty if it did.
        times: how often it was met.
    """

    reason: str
    explanation: str
    hints: tuple[str, ...]
    link: str
    file: str
    line: int
    code: str
    abandons: str = ""
    because: str = ""
    times: int = 1


@dataclass(frozen=True)
class Recompile:
    """A frame that was compiled again.

    Attributes:
        compile_id: Dynamo's own, of the new compilation.
        function: what was compiled again.
        file: its source file.
        line: its first line.
        guard: the guard that failed.
        read_by: the line for which Dynamo set it up, where Dynamo says so.
        seconds: what the new compilation took.
        step: the step of training in which it happened.
    """

    compile_id: str
    function: str
    file: str
    line: int
    guard: str
    seconds: float
    step: int
    read_by: str = ""


@dataclass(frozen=True)
class SegmentTime:
    """One piece that AOTAutograd, or a backend without it, compiled.

    Attributes:
        index: position in the order of compilation.
        forward_s: seconds until the forward could run; with the backward if that was compiled with it.
        backward_s: seconds for the backward when it first ran; None if it was not compiled then.
        params: parameters whose gradients it completes, where that is known.
    """

    index: int
    forward_s: float
    backward_s: float | None
    params: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompileTime:
    """Where one mode's compile time went.

    Attributes:
        mode: ``"torch's DDPOptimizer"`` or ``"ddpopt"``.
        graphs: how many graphs Dynamo captured.
        phases: name and seconds; they do not overlap, and add up to the whole.
        segments: what was compiled, in order.
        failed: whether the mode failed, so that this is what it compiled before.
    """

    mode: str
    graphs: int
    phases: tuple[tuple[str, float], ...]
    segments: tuple[SegmentTime, ...]
    failed: bool = False

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return sum(seconds for _, seconds in self.phases)


@dataclass(frozen=True)
class RealBucket:
    """A bucket of the running reducer.

    Attributes:
        index: position in the order of reduction.
        params: names as in ``module.named_parameters()``.
        nbytes: sum of ``numel * element_size`` over `params`.
        segments: on whose backward it waits, ascending.
    """

    index: int
    params: tuple[str, ...]
    nbytes: int
    segments: tuple[int, ...]


@dataclass(frozen=True)
class Alignment:
    """How the running buckets of one mode stand to its segments.

    Attributes:
        mode: ``"torch's DDPOptimizer"`` or ``"ddpopt"``.
        segments: how many segments run in a forward; None if that is not known.
        buckets: in the order of reduction.
        early: how many leave before the last segment's backward; None if segments are not known.
        spread: how many wait on more than one segment; None if segments are not known.
        inline: whether gradients leave from inside of the compiled backward, so that no bucket waits for
            a whole segment.
    """

    mode: str
    segments: int | None
    buckets: tuple[RealBucket, ...]
    early: int | None
    spread: int | None
    inline: bool = False


@dataclass(frozen=True)
class Unused:
    """A trainable parameter that got no gradient in some backward.

    Attributes:
        name: as in ``module.named_parameters()``.
        missing: rank and step of each backward that gave it none.
        always: whether no backward gave it any.
    """

    name: str
    missing: tuple[tuple[int, int], ...]
    always: bool


@dataclass(frozen=True)
class Overcounted:
    """A parameter that torch's optimizer counts at more bytes than DDP reduces.

    Attributes:
        name: as in ``module.named_parameters()``.
        nbytes: what DDP reduces.
        times: how often the optimizer counts it.
        storage_bytes: what it counts each time: the whole storage.
    """

    name: str
    nbytes: int
    times: int
    storage_bytes: int


@dataclass(frozen=True)
class Diagnosis:
    """One model, run in eager DDP, under torch's DDPOptimizer and under ddpopt.

    ``str()`` is what ``ddpopt doctor`` prints: plain text, at most 80 columns.

    Attributes:
        case: name of the case.
        model: name of the model's class.
        backend: the Dynamo backend.
        steps: how many steps each mode ran.
        ranks: the inputs of how many ranks were tried for unused parameters.
        world_size: size of the process group.
        torch_version: of the torch that ran.
        findings: those that matter most first.
        breaks: graph breaks of the model.
        recompiles: of the model's frames.
        compile_times: one entry for each compiled mode.
        alignments: one entry for each compiled mode that ran to its end.
        unused: trainable parameters without a gradient in some backward.
        overcounted: parameters that torch's optimizer counts at more than their size.
    """

    case: str
    model: str
    backend: str
    steps: int
    ranks: int
    world_size: int
    torch_version: str
    findings: tuple[Finding, ...]
    breaks: tuple[Break, ...]
    recompiles: tuple[Recompile, ...]
    compile_times: tuple[CompileTime, ...]
    alignments: tuple[Alignment, ...]
    unused: tuple[Unused, ...]
    overcounted: tuple[Overcounted, ...]

    def __str__(self) -> str:
        return render(self)

    @property
    def problems(self) -> Sequence[Finding]:
        """The findings that call for something to be done."""
        return tuple(finding for finding in self.findings if finding.weight is not Weight.NOTE)

    @property
    def exit_code(self) -> int:
        """1 if a step fails, or would train something else; else 0."""
        wrong = any(finding.weight is Weight.WRONG for finding in self.findings)
        return VerificationError.exit_code if wrong else 0

    def to_json(self) -> str:
        """The diagnosis as JSON text."""
        return json.dumps({"ddpopt_diagnosis": FORMAT, **asdict(self)}, indent=2)
