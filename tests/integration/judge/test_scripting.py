"""Scripts: the code of a segment computes what the segment computed, and each kind of script is run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from ddpopt.judge.locating.known import Blamed
from ddpopt.judge.locating.pieces import EVERYTHING, ChosenPieces
from ddpopt.judge.locating.reproduction import shows
from ddpopt.judge.locating.rungs import Question, Stage, Symptom
from ddpopt.judge.locating.scripting import Draft, Written, drafts_of, write
from ddpopt.judge.locating.segment_code import Code, Recorder
from tests.unit import miscompiled

MODULE = miscompiled.__name__  # which registers its backends
LIMIT_S = 100.0
LAYER = "the backend that is wrong"
DOUBLING = """
def compiler(gm, example_inputs):
    return lambda *args: tuple(2 * out for out in gm(*args))
"""
SEGMENT = """class Segment(torch.nn.Module):
    def forward(self, x):
        return ({}(x),)
"""
NUMBERS = Symptom("numbers")


def segment(function: str = "torch.tanh") -> Blamed:
    arguments = {"x": "torch.ones(4, 8, requires_grad=True)"}
    return Blamed(("graph 0, segment 5 of 8",), Code(SEGMENT.format(function), arguments))


def drafts(
    tmp_path: Path, backend: str, blamed: Blamed, symptom: Symptom = NUMBERS, **question: Any
) -> list[Draft]:
    asked = Question(f"{MODULE}:short", "default", "whole", backend, **{"steps": 1, **question})
    return drafts_of(asked, Stage("local", backend), symptom, blamed, LAYER, tmp_path / "shown.py")


def exit_code(draft: Draft) -> int:
    """Run the script of a segment here."""
    scope: dict[str, Any] = {}
    with torch._inductor.config.patch(fallback_random=False):  # a script sets it for good
        exec(draft.text, scope)
        code: int = scope["main"]()
    return code


# ------------------------------------------------------------------------------------------- what they say


@pytest.mark.parametrize(
    ("symptom", "does", "ends"),
    [
        (Symptom("died", "SIGSEGV"), "takes the process down (SIGSEGV).", "It ends of SIGSEGV"),
        (Symptom("run", "BackendCompilerFailed"), "fails where eager runs.", "It exits with 1"),
        (NUMBERS, "does not do what eager does.", "It exits with 1"),
    ],
)
def test_every_script_says_what_is_wrong_and_how_to_run_it_and_a_segment_needs_no_ddpopt(
    tmp_path: Path, fresh_dynamo: None, symptom: Symptom, does: str, ends: str
) -> None:
    alone, step = drafts(tmp_path, "scaling_tanh", segment(), symptom, rank=1, dtype="float64")
    for draft in (alone, step):
        compile(draft.text, "shown.py", "exec")
        assert draft.text.startswith(f'"""The backend that is wrong {does}\n\nFound by `ddpopt verify`:\n')
        assert "Run it with 'python shown.py'.\n" in draft.text
        assert "\ngraph 0, segment 5 of 8\n" in draft.text
        assert max(map(len, draft.text.splitlines())) <= 110
        assert f"import {MODULE}  # registers the backend" in draft.text
    assert "import ddpopt" not in alone.text
    assert ("def expectation" in alone.text) == (symptom == NUMBERS)
    assert f"\n{ends} if the difference appears, with " in alone.text
    assert "\nIt exits with 1 if the difference appears, with 0 if it does not.\n" in step.text
    assert all(each in step.text for each in ("nproc=2,", "mode='whole',", "dtype='float64',"))
    assert (alone.death, step.death) == (symptom.how if symptom.kind == "died" else "", "")


# --------------------------------------------------------------------------------------- code of a segment


class Branching(nn.Module):
    """Holds a graph inside of its graph."""

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = checkpoint(lambda y: torch.tanh(y).sin(), x, use_reentrant=False)
        return kept * torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("model", "part", "x"),
    [
        (miscompiled.Stages(), range(2, 4), torch.ones(8, 4).t()),
        (Branching(), EVERYTHING, torch.ones(2, 3, requires_grad=True)),
    ],
    ids=["a part", "a graph that holds another"],
)
def test_the_code_of_a_segment_computes_what_it_computed_of_arguments_of_the_same_form(
    tmp_path: Path, fresh_dynamo: None, model: nn.Module, part: range, x: Tensor
) -> None:
    recorder = Recorder()
    given: list[tuple[Any, Any]] = []

    def compiler(gm: Any, inputs: Any) -> Any:
        run = recorder(gm, inputs)

        def kept(*arguments: Any) -> Any:
            given.append((arguments, run(*arguments)))
            return given[-1][1]

        return kept

    torch.compile(model, backend=ChosenPieces(compiler, part))(x)
    (code,), ((arguments, results),) = recorder.codes, given
    assert code is not None
    scope: dict[str, Any] = {}
    with torch._inductor.config.patch(fallback_random=False):
        exec(drafts(tmp_path, "aot_eager", Blamed(code=code))[0].text, scope)
    built, drawn = scope["built"](scope["Segment"]), list(scope["inputs"]().values())
    for value, argument in zip(drawn, arguments, strict=True):
        assert (value.shape, value.stride()) == (argument.shape, argument.stride())
        assert (value.dtype, value.requires_grad) == (argument.dtype, argument.requires_grad)
    assert torch.equal(built(*arguments)[0], results[0])
    compiled: Any = torch.compile(built, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments)[0], results[0])


def test_a_segment_with_an_argument_that_torch_cannot_draw_has_no_code() -> None:
    recorder = Recorder()
    run = recorder(fx.symbolic_trace(nn.Identity()), ())
    run(torch.eye(2).to_sparse())
    assert recorder.codes == [None]


# --------------------------------------------------------------------------------------------- what they do


def test_a_segment_shows_no_difference_where_it_is_right_and_one_where_it_is_wrong(
    tmp_path: Path, fresh_dynamo: None
) -> None:
    right, wrong = (drafts(tmp_path, name, segment())[0] for name in ("aot_eager", "scaling_tanh"))
    assert (exit_code(right), exit_code(wrong)) == (0, 1)
    dropping = drafts(tmp_path, "inductor", segment("torch.nn.functional.dropout"))[0]
    assert exit_code(dropping) == 0, "other random numbers than eager's"


def test_a_failure_is_shown_with_its_traceback(
    tmp_path: Path, fresh_dynamo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Symptom("run", "BackendCompilerFailed")
    assert exit_code(drafts(tmp_path, "refusing_tanh", segment(), failed)[0]) == 1
    printed = capsys.readouterr()
    assert "ArithmeticError: no tanh here" in printed.err
    assert "the difference appears: eager runs, compiled code does not" in printed.out


def test_a_segment_shows_the_difference_in_a_fresh_interpreter_that_never_loads_ddpopt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doubling.py").write_text(DOUBLING)
    monkeypatch.syspath_prepend(tmp_path)
    text = drafts(tmp_path, "doubling:compiler", segment())[0].text
    assert "\nfrom doubling import compiler\n\nBACKEND = compiler\n" in text
    text = text.replace(
        "sys.exit(main())", "code = main()\n    sys.exit(code + 8 * ('ddpopt' in sys.modules))"
    )
    assert write(tmp_path / "shown.py", [Draft("it", text)], lambda: LIMIT_S).reproduces


@pytest.mark.parametrize(
    ("backend", "symptom", "reproduces"),
    [
        ("scaling_tanh", NUMBERS, True),
        pytest.param("aot_eager", NUMBERS, False, marks=pytest.mark.nightly),
        pytest.param("dying_on_tanh", Symptom("died", "SIGSEGV"), True, marks=pytest.mark.nightly),
    ],
)
def test_the_step_is_verified_again_in_a_fresh_interpreter(
    tmp_path: Path, backend: str, symptom: Symptom, reproduces: bool
) -> None:
    script = tmp_path / "shown.py"
    arguments = {"bucket_cap_mb": 0.5}
    (draft,) = drafts(tmp_path, backend, Blamed(), symptom, ddp_kwargs=arguments)
    note = "the script runs the data-parallel step, on 1 rank(s) that it starts"
    assert write(script, [draft], lambda: LIMIT_S) == Written("shown.py", reproduces, note)


# ------------------------------------------------------------------------- what counts as a reproduction

SHOWS = "print('the difference appears'); raise SystemExit(1)"
AGREES = "print('no difference')"


@pytest.mark.parametrize(
    ("text", "death", "shown"),
    [
        (SHOWS, "", True),
        (AGREES, "", False),
        ("raise RuntimeError('of its own')", "", False),
        ("raise SystemExit(1)", "", False),
        ("print('the difference appears')", "", False),
        ("import time; time.sleep(60)", "", False),
        ("raise SystemExit(7)", "exit code 7", False),  # before eager was done
        ("print('eager is done; compiled:', flush=True); raise SystemExit(7)", "exit code 7", True),
        (
            "print('eager is done; compiled:', flush=True); import os; os.kill(os.getpid(), 9)",
            "SIGKILL",
            True,
        ),
        (
            "print('eager is done; compiled:', flush=True); import os; os.kill(os.getpid(), 9)",
            "SIGSEGV",
            False,
        ),
    ],
)
def test_a_script_counts_only_if_it_ends_as_the_difference_makes_it_end(
    tmp_path: Path, text: str, death: str, shown: bool
) -> None:
    (tmp_path / "shown.py").write_text(text)
    assert shows(tmp_path / "shown.py", 1, 0.5 if "sleep" in text else 30.0, death=death) is shown


@pytest.mark.parametrize(
    ("texts", "seconds", "written", "note"),
    [
        ((AGREES, SHOWS, AGREES), 30.0, Written("shown.py", True, "the script runs number 1"), SHOWS),
        ((AGREES,), 30.0, Written("shown.py", False, "the script runs number 0"), AGREES),
        (
            (SHOWS,),
            0.0,
            Written("shown.py", False, "the script runs number 0; no time was left to run it"),
            SHOWS,
        ),
    ],
)
def test_the_first_script_that_shows_it_stays_or_else_the_last_and_one_that_was_not_run_says_so(
    tmp_path: Path, texts: tuple[str, ...], seconds: float, written: Written, note: str
) -> None:
    tried = [Draft(f"number {index}", text) for index, text in enumerate(texts)]
    assert write(tmp_path / "shown.py", tried, lambda: seconds) == written
    assert (tmp_path / "shown.py").read_text() == note
