r"""Tell failures apart by the exception and where it was raised, or by the level of the ladder.

Invariant: equal failures have equal signatures on every machine: a signature contains no line number, path,
size or step name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpopt.judge.verdict import Finding

ORDER = ("run", "L3", "L0", "L1", "L2")
# the last frame of the text; the user's own also has its code
_FRAME = re.compile(r".*\((?P<file>[^():]+):\d+ in (?P<name>[^():]+)(?:: .*)?\)$", re.DOTALL)
_ROOT = re.compile(
    r"(?:raised: |InternalTorchDynamoError: |InductorError: |LoweringException: |got )"
    r"(?P<name>[A-Z]\w*(?:Error|Exception|Unsupported|Failed|Interrupt|Symbol\w*))\b"
)
_INVARIANT = re.compile(r"violation\(s\):\s+- (?P<name>[a-z ]+): ")
_STACK = re.compile(r'File "(?P<file>[^"]+)", line \d+ in (?P<name>\S+)')
_DRAWN = re.compile(r"<?drawn_[0-9a-f]{12}>?")
# Inductor names generated files after their content; fx numbers them
_GENERATED = re.compile(r"\bc[a-z2-7]{51}\.py\b|<eval_with_key>\.\d+")


@dataclass(frozen=True, order=True)
class FailureSignature:
    """The identity of a failure.

    Attributes:
        kind: ``"error"``, a level of the ladder, ``"death"`` or ``"no end"``.
        what: the exception, the claim, what is unequal, or the cause of the process's death.
        where: the innermost frame, or the sort of parameter.
    """

    kind: str
    what: str
    where: str = ""

    def __str__(self) -> str:
        place = f" in {self.where}" if self.where else ""
        return f"{self.kind}: {self.what}{place}"


def signature_of(findings: Sequence[Finding]) -> FailureSignature:
    """The signature of the most important of several findings: an error first."""
    return of_finding(min(findings, key=lambda finding: ORDER.index(finding.level)))


def of_finding(finding: Finding) -> FailureSignature:
    """The signature of one finding."""
    if finding.level == "run":
        return of_error(finding.message)
    what, where = _sort(finding.parameter or "")
    if finding.level == "L3":
        return FailureSignature("L3", finding.claim, where)
    return FailureSignature(finding.level, what, where)


def of_error(text: str) -> FailureSignature:
    """The signature of an exception, as verification reports it: ``Type: message (file:line in function)``.

    Dynamo wraps exceptions of its backends; the wrapped exception counts. For a cut that is not proved, the
    first invariant that it breaks counts.

    >>> str(of_error("BackendCompilerFailed: backend='x' raised: KeyError: 'h3' (graph.py:12 in find)"))
    'error: KeyError in graph.py in find'
    """
    kind = text.partition(":")[0]
    root = _ROOT.search(text)
    frame = _FRAME.search(text)
    where = f"{Path(frame['file']).name} in {frame['name']}" if frame else ""
    broken = _INVARIANT.search(text)
    what = (root["name"] if root else kind) + (f" ({broken['name']})" if broken else "")
    return FailureSignature("error", what, _named(where))


def of_death(how: str, stacks: str) -> FailureSignature:
    """The signature of a process that died.

    Args:
        how: the signal, or the exit code.
        stacks: what faulthandler wrote; may be empty.

    Returns:
        A signature with the innermost frame of the thread that died.
    """
    _, found, own = stacks.rpartition("Current thread")
    frame = _STACK.search(own if found else stacks)
    if frame is None:
        return FailureSignature("death", how)
    file = _named(frame["file"].rpartition("/")[2])
    return FailureSignature("death", how, f"{file} in {frame['name']}")


def _named(place: str) -> str:
    """A place, with a generic name for files whose name differs for each model."""
    return _GENERATED.sub("the compiled code", _DRAWN.sub("the model", place))


ROUNDING = FailureSignature("L0", "rounding")
"""For a backend's numbers that are as accurate as eager's but not bitwise equal, in any parameter."""
NO_END = FailureSignature("no end", "within the time limit")
"""For a model that exceeded its time limit."""


def _sort(name: str) -> tuple[str, str]:
    """The kind of a number, and the sort of parameter it belongs to.

    >>> _sort("block2.linear3b.weight"), _sort("buffer norm1.running_mean"), _sort("the loss")
    (('gradient', 'linear.weight'), ('buffer', 'norm.running_mean'), ('loss', ''))
    """
    word, _, rest = name.partition(" ")
    if name == "the loss":
        return "loss", ""
    if word in ("buffer", "parameter") and rest:
        return word, _plain(rest)
    return "gradient", _plain(name)


def _plain(name: str) -> str:
    parts = [re.sub(r"\d+b*$", "", part) for part in name.split(".")]
    return ".".join(part for part in parts if part != "block")
