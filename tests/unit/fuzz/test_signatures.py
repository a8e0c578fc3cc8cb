"""Telling failures apart: equal ones have one signature, whatever the line, the size or the machine."""

import pytest

from ddpopt.errors import CertificateError
from ddpopt.fuzz.examine import beyond_rounding, own_findings
from ddpopt.fuzz.signatures import of_death, of_error, signature_of
from ddpopt.judge.verdict import Finding, Status, Trial

STACK = """\
Fatal Python error: Segmentation fault

Thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x02 (most recent call first):
  File "/somewhere/torch/_ops.py", line 841 in __call__
  File "/elsewhere/worker.py", line 3 in serve
"""


unproved = f"CertificateError: {CertificateError(('grad state: one: not it', 'one bucket: two'))}"


def error(text: str) -> Finding:
    return Finding("run", "the step runs", text)


def unequal(level: str, parameter: str) -> Finding:
    return Finding(level, "equal", "off by 1", parameter=parameter)


@pytest.mark.parametrize(
    ("text", "signature"),
    [
        ("KeyError: 'h3' (graph.py:12 in find)", "KeyError in graph.py in find"),
        ("KeyError: 2 (graph.py:99 in find)", "KeyError in graph.py in find"),
        (
            "BackendCompilerFailed: backend='aot_eager' raised: AttributeError: 'float' object (x.py:1 in f)",
            "AttributeError in x.py in f",
        ),
        ("TorchRuntimeError: fake: got RuntimeError('size') (z.py:2 in h)", "RuntimeError in z.py in h"),
        ("ValueError: no (<drawn_0123456789ab>:7 in forward)", "ValueError in the model in forward"),
        ("RuntimeError: no (<eval_with_key>.2:1 in forward)", "RuntimeError in the compiled code in forward"),
        ("ValueError: no", "ValueError"),
        (
            f"BackendCompilerFailed: backend='ddpopt' raised: {unproved} (certificate.py:69 in certify)",
            "CertificateError (grad state) in certificate.py in certify",
        ),
    ],
)
def test_an_exception_is_identified_by_its_first_cause_and_innermost_frame(text: str, signature: str) -> None:
    assert str(of_error(text)) == f"error: {signature}"


def test_a_death_is_identified_by_the_innermost_frame_of_the_thread_that_died() -> None:
    assert str(of_death("SIGSEGV", STACK)) == "death: SIGSEGV in _ops.py in __call__"
    assert str(of_death("SIGKILL", "")) == "death: SIGKILL"


def test_an_error_matters_more_than_a_number() -> None:
    assert signature_of([unequal("L0", "w"), error("KeyError: 1 (a.py:1 in f)")]).what == "KeyError"


@pytest.mark.parametrize(
    ("found", "whole", "own"),
    [
        ([unequal("L0", "w")], [], 1),
        # which number is the first to differ depends on the cuts
        ([unequal("L0", "w")], [unequal("L0", "the loss")], 0),
        ([error("KeyError: 1 (a.py:1 in f)")], [unequal("L0", "w")], 1),
        ([error("KeyError: 1 (a.py:1 in f)")], [error("KeyError: 2 (a.py:3 in f)")], 0),
        ([unequal("L0", "w")], [error("ValueError: 2 (b.py:3 in g)")], 0),
        ([Finding("L3", "as many steps", "2")], [unequal("L0", "w")], 1),
    ],
)
def test_a_failure_counts_against_a_mode_only_where_the_backend_alone_is_right(
    found: list[Finding], whole: list[Finding], own: int
) -> None:
    assert len(own_findings(found, whole)) == own


@pytest.mark.parametrize(
    ("roughly", "status", "left"),
    [
        ([], Status.OK, []),
        ([unequal("L2", "b")], Status.WRONG, ["b"]),
        # what follows the first step that differs is judged by the second look alone
        ([unequal("L2", "c")], Status.WRONG, ["c"]),
        ([Finding("L3", "as many steps", "2")], Status.WRONG, []),
        # it ran another way than before: nothing is known
        ([error("KeyError: 1 (a.py:1 in f)")], Status.WRONG, ["a", "b"]),
        ([], Status.BROKEN, ["a", "b"]),
    ],
)
def test_what_is_right_as_eager_is_rounding(roughly: list[Finding], status: Status, left: list[str]) -> None:
    found = [unequal("L0", "a"), unequal("L0", "b")]
    trial = Trial("case", "whole", "default", "aot_eager", status, findings=tuple(roughly))
    assert [finding.parameter for finding in beyond_rounding(found, trial)] == left
