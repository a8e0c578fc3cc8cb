"""The doctor's results as data: findings with their next steps, and the evidence for each.

Invariant: frozen; the text depends only on these fields.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from ddpopt.errors import VerificationError
from ddpopt.observation.reducer_buckets import ObservedBucket
from ddpopt.terminal.tables import Column, mib, names, numbers, paragraph, table
from ddpopt.torch_private import RELEASES


class Weight(StrEnum):
    """How much a finding matters."""

    WRONG = "wrong"
    """The step fails, or would train something else."""
    SLOW = "slow"
    """It costs overlap or compile time."""
    NOTE = "note"
    """Worth knowing; no action needed."""


@dataclass(frozen=True)
class Advice:
    """One finding, and what to do about it.

    Attributes:
        topic: ``"run"``, ``"graph break"``, ``"recompile"``, ``"buckets"``, ``"parameters"`` or
            ``"options"``.
        weight: how much it matters.
        what: the finding, in sentences.
        step: the next step to take, in sentences.
        place: file and line of the cause, as ``"model.py:7"``; empty if unknown.
        symptoms: other findings that follow from this one, in sentences.
    """

    topic: str
    weight: Weight
    what: str
    step: str
    place: str = ""
    symptoms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unused:
    """A trainable parameter that got no gradient in some backward.

    Attributes:
        name: as in ``module.named_parameters()``.
        missing: rank and step of each backward that gave it none.
        always: whether no backward gave it a gradient.
    """

    name: str
    missing: tuple[tuple[int, int], ...]
    always: bool


@dataclass(frozen=True)
class Diagnosis:
    """One model, run in eager DDP, under torch's DDPOptimizer and under ddpopt.

    ``str()`` is what ``ddpopt doctor`` prints: plain text, at most 80 columns.

    Attributes:
        case: name of the case.
        model: name of the model's class.
        backend: the Dynamo backend.
        steps: the number of steps of each mode.
        ranks: the number of ranks whose inputs were tried for unused parameters.
        torch_version: version of torch.
        python_version: version of Python.
        findings: the findings, most important first.
        buckets: for each mode that ran to its end, the buckets of the running reducer.
        unused: trainable parameters without a gradient in some backward.
    """

    case: str
    model: str
    backend: str
    steps: int
    ranks: int
    torch_version: str
    python_version: str
    findings: tuple[Advice, ...]
    buckets: dict[str, tuple[ObservedBucket, ...]]
    unused: tuple[Unused, ...]

    @property
    def problems(self) -> Sequence[Advice]:
        """The findings that require action."""
        return tuple(finding for finding in self.findings if finding.weight is not Weight.NOTE)

    @property
    def exit_code(self) -> int:
        """1 if a step fails or would train something else; otherwise 0."""
        wrong = any(finding.weight is Weight.WRONG for finding in self.findings)
        return VerificationError.exit_code if wrong else 0

    def to_json(self) -> str:
        """The diagnosis as JSON text."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        return "\n\n".join(self._blocks())

    def _blocks(self) -> Iterator[str]:
        yield paragraph(
            f"{self.model}: {self.steps} steps in each mode, backend {self.backend}, torch "
            f"{self.torch_version} (supported: {RELEASES}), Python {self.python_version}",
            "  ",
        )
        if self.problems:
            yield f"What to do, most important first ({len(self.problems)})"
        else:
            yield "Nothing to do: nothing was found that costs overlap or compile time."
        for number, finding in enumerate(self.problems, 1):
            label = f"{number}. {finding.weight.value}, {finding.topic}: "
            lines = [paragraph(label + finding.what, "   ")]
            lines += [paragraph(f"   So: {symptom}", "   ") for symptom in finding.symptoms]
            lines.append(paragraph(f"   Next: {finding.step}", "   "))
            yield "\n".join(lines)
        for mode, buckets in self.buckets.items():
            rows = [(bucket.index, mib(bucket.nbytes), names(bucket.params)) for bucket in buckets]
            columns = [*numbers("bucket", "MiB"), Column("gradients")]
            yield f"{mode}: buckets of the running reducer\n{table(columns, rows)}"
        notes = [finding for finding in self.findings if finding not in self.problems]
        for finding in notes:
            yield f"{paragraph(f'Note: {finding.what}', '  ')}\n{paragraph(f'  {finding.step}', '  ')}"
