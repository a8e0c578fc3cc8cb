"""Case files: they come back as they went, run nothing of what they say, and scripts stand alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ddpopt.errors import UsageError
from ddpopt.fuzz.cases import FoundCase, read_model
from ddpopt.fuzz.questions import Outcome, Setting
from ddpopt.fuzz.scripting import script_of
from ddpopt.fuzz.signatures import FailureSignature
from ddpopt.testing.drawn import DrawnModel, step

MODEL = DrawnModel(
    steps=(step("residual", body=(step("linear"),)), step("scale", 2)),
    outputs=(step("earlier"),),
    batches=(2, 3),
    cap_bytes=1,
    joined=False,
)
CASE = FoundCase(MODEL, "torch", Setting(nproc=2), FailureSignature("error", "KeyError", "a.py in f"))


def imports(script: str) -> set[str]:
    return set(re.findall(r"^ *(?:from|import) (\w+)", script, re.MULTILINE))


def test_a_case_comes_back_as_it_was_written(tmp_path: Path) -> None:
    case = replace(CASE, kind=Outcome.BACKEND, detail="said\nso", torch="2.13.0", origin="seed 1", about="x")
    file = tmp_path / "case.json"
    file.write_text(case.to_json())
    assert FoundCase.read(file) == case


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').getcwd()",
        "DrawnModel(seed=__import__('os').getpid())",
        "DrawnModel(",
        "[DrawnModel() for _ in (1,)]",
    ],
)
def test_the_text_of_a_model_is_read_and_not_run(text: str) -> None:
    with pytest.raises(UsageError, match="expected the repr of a DrawnModel"):
        read_model(text)


@pytest.mark.parametrize(
    ("signature", "backend"),
    [
        (CASE.signature, "aot_eager"),
        (FailureSignature("L0", "loss"), "aot_eager"),
        (FailureSignature("L2", "loss"), "inductor"),
        (FailureSignature("death", "SIGSEGV"), "inductor"),
    ],
)
def test_the_script_of_a_fault_of_torchs_needs_torch_alone(signature: FailureSignature, backend: str) -> None:
    case = replace(CASE, signature=signature, setting=Setting(backend))
    of_the_backend = replace(case, mode="ddpopt-split", kind=Outcome.BACKEND)
    script = script_of(case, "x.py")
    assert imports(script) <= {"sys", "os", "traceback", "torch", "dataclasses"}
    assert "_DEFAULT_FIRST_BUCKET_BYTES = 1\n" in script
    assert "ddpopt" not in imports(script_of(of_the_backend, "x.py"))


def test_the_script_of_a_fault_of_ddpopts_has_ddpopt_judge() -> None:
    script = script_of(replace(CASE, mode="ddpopt-split"), "x.py")
    assert "ddpopt" in imports(script)
    assert "_DEFAULT_FIRST_BUCKET_BYTES" not in script
    assert "mode='ddpopt-split'" in script
    trained = replace(CASE, model=replace(MODEL, training="clipping"))
    assert "options=['clipping']" in script_of(trained, "x.py")
