"""Fold findings that follow from another one into it, so that a report begins with causes.

Invariant: nothing that was found is lost: what is folded is said with its cause.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ddpopt.doctor.diagnosis import Advice, Weight

NOT_COMPILED = "no part of the model is compiled"
WAITS_IN_VAIN = "because some parameters got no gradient"


def causes_first(findings: Iterable[Advice]) -> tuple[Advice, ...]:
    """The findings, most important first; of equally important ones, those that others follow from.

    Args:
        findings: all of them, in the order in which they were found.
    """
    left = [*findings]
    for is_cause, is_symptom in RULES:
        left = _folded(left, is_cause, is_symptom)
    weights = [*Weight]
    return tuple(sorted(left, key=lambda each: (weights.index(each.weight), not each.symptoms)))


def _folded(
    findings: Sequence[Advice],
    is_cause: Callable[[Advice], bool],
    is_symptom: Callable[[Advice, Advice], bool],
) -> list[Advice]:
    """Fold each symptom into the first cause that it follows from."""
    symptoms: dict[int, list[str]] = {}
    folded: set[int] = set()
    for place, cause in enumerate(findings):
        if place in folded or not is_cause(cause):
            continue
        for other, finding in enumerate(findings):
            if other != place and other not in folded and is_symptom(cause, finding):
                symptoms.setdefault(place, []).append(finding.what)
                folded.add(other)
    return [
        replace(each, symptoms=(*each.symptoms, *symptoms.get(place, ())))
        for place, each in enumerate(findings)
        if place not in folded
    ]


def _is_break(finding: Advice) -> bool:
    return finding.topic == "graph break"


def _is_about_parameters(finding: Advice) -> bool:
    return finding.topic == "parameters" and finding.weight is Weight.WRONG


RULES: tuple[tuple[Callable[[Advice], bool], Callable[[Advice, Advice], bool]], ...] = (
    # a line may break the graph for several reasons, and what follows it is compiled again
    (_is_break, lambda cause, finding: bool(finding.place) and finding.place == cause.place),
    (_is_break, lambda _, finding: finding.topic == "run" and NOT_COMPILED in finding.what),
    (_is_about_parameters, lambda _, finding: finding.topic == "run" and WAITS_IN_VAIN in finding.what),
)
"""What is a cause, and what follows from it."""
