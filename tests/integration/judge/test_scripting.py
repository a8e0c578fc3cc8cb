"""The text of the scripts, and one of each kind run in a fresh interpreter."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpopt.judge.locating.known import Blamed
from ddpopt.judge.locating.reproduction import Draft, write
from ddpopt.judge.locating.rungs import Question, Stage, Symptom
from ddpopt.judge.locating.scripting import Author
from ddpopt.judge.locating.segment_code import Code
from tests.unit import miscompiled

MODULE = miscompiled.__name__  # which registers its backends
LIMIT_S = 100.0
DOUBLING = """
def compiler(gm, example_inputs):
    return lambda *args: tuple(2 * out for out in gm(*args))
"""
SEGMENT = """class Segment(torch.nn.Module):
    def forward(self, x):
        return ({}(x),)
"""
TRAINED = torch.ones(2, 3, requires_grad=True)


def author(tmp_path: Path, backend: str, target: str = f"{MODULE}:stages", rank: int = 0) -> Author:
    return Author(Question(target, "default", "whole", backend, steps=1, rank=rank), tmp_path / "shown.py")


def exit_code(draft: Draft) -> int:
    """Run a script here, where its process group is there already."""
    scope: dict[str, Any] = {}
    dynamo, inductor = torch._dynamo.config, torch._inductor.config
    # a script sets them for good
    with dynamo.patch(optimize_ddp=True), inductor.patch(fallback_random=False):
        exec(draft.text, scope)
        code: int = scope["main"]()
    return code


def segment(x: torch.Tensor, function: str = "torch.tanh") -> Blamed:
    return Blamed(("graph 0, segment 5 of 8",), Code(SEGMENT.format(function), {"x": x}))


def test_every_script_is_a_program_that_says_how_to_run_it(tmp_path: Path) -> None:
    blamed = segment(TRAINED)
    drafts = author(tmp_path, "scaling_tanh").drafts(Stage("local", "scaling_tanh"), blamed)
    drafts += author(tmp_path, "scaling_tanh", rank=1).drafts(Stage("torch", "scaling_tanh", 2), Blamed(()))
    for draft in drafts:
        compile(draft.text, "shown.py", "exec")
        assert ("from ddpopt" in draft.text) == ("without ddpopt" not in draft.kind)
        registers = draft.text.index(f"import {MODULE}  # registers the backend")
        assert draft.text.index("sys.path.insert") < registers
        command = "python" if draft.ranks == 1 else "torchrun --nproc-per-node 2"
        assert f"Run it with '{command} shown.py'.\n" in draft.text
        assert max(map(len, draft.text.splitlines())) <= 110
    assert [draft.kind for draft in drafts] == [
        "the segment alone, without DDP and without ddpopt",
        "the segment alone, without DDP and without ddpopt",
        "the model, without DDP, without ddpopt",
        "the model under DDP, without ddpopt",
        "the data-parallel step",
    ]


def test_a_segment_that_needs_it_is_tried_with_the_module_of_the_target_too(tmp_path: Path) -> None:
    blamed = segment(torch.ones(2, 3))
    drafts = author(tmp_path, "aot_eager").drafts(Stage("local", "aot_eager"), blamed)
    imported = [f"import {MODULE}  # it may set up" in draft.text for draft in drafts]
    assert imported == [False, True, False]
    assert [bool(draft.tensors) for draft in drafts] == [False, True, False]


def test_arguments_that_cannot_be_drawn_are_saved_beside_the_script(tmp_path: Path) -> None:
    sparse = torch.eye(2).to_sparse()
    drafts = author(tmp_path, "aot_eager").drafts(Stage("local", "aot_eager"), segment(sparse))
    assert list(drafts[0].tensors) == ["x"]
    assert "rand_strided(" not in drafts[0].text


def test_the_segment_shows_the_difference_in_a_fresh_interpreter_that_never_loads_ddpopt(
    tmp_path: Path,
) -> None:
    (tmp_path / "doubling.py").write_text(DOUBLING)
    writer = Author(Question("x:y", "default", "whole", "doubling:compiler", steps=1), tmp_path / "shown.py")
    blamed = segment(TRAINED)
    path = [*sys.path]
    sys.path.insert(0, str(tmp_path))
    try:
        text = writer.drafts(Stage("ddpopt-inline", "doubling:compiler"), blamed)[0].text
    finally:
        sys.path[:] = path
    assert "from doubling import compiler\n" in text
    assert "\nBACKEND = compiler\n" in text
    text = text.replace(
        "sys.exit(main())", "code = main()\n    assert 'ddpopt' not in sys.modules\n    sys.exit(code)"
    )
    assert write(writer.script, [Draft("it", text)], lambda: LIMIT_S).reproduces


@pytest.mark.parametrize(
    ("symptom", "headline", "ends"),
    [
        (Symptom("died", "SIGSEGV"), "takes the process down (SIGSEGV).", "It ends of SIGSEGV"),
        (Symptom("run", "BackendCompilerFailed"), "fails where eager runs.", "It exits with 1"),
        (Symptom("numbers"), "does not compute what eager computes.", "It exits with 1"),
    ],
)
def test_a_script_begins_with_the_difference_and_has_no_more_than_shows_it(
    tmp_path: Path, fresh_dynamo: None, symptom: Symptom, headline: str, ends: str
) -> None:
    blamed = replace(segment(TRAINED), symptom=symptom)
    for draft in author(tmp_path, "aot_eager").drafts(Stage("local", "aot_eager"), blamed):
        begins = f"torch.compile with backend 'aot_eager' {headline}"
        assert draft.text.startswith(f'"""{begins}\n\nFound by `ddpopt verify`:\n')
        assert f"\n{ends} if the difference appears, with " in draft.text
        assert ("def expectation" in draft.text) == (symptom.kind == "numbers")
        assert draft.death == ("SIGSEGV" if symptom.kind == "died" else "")
        assert draft.tensors or exit_code(draft) == 0


def test_a_failure_is_shown_with_its_traceback(
    tmp_path: Path, fresh_dynamo: None, capsys: pytest.CaptureFixture[str]
) -> None:
    blamed = replace(segment(torch.ones(2)), symptom=Symptom("run", "BackendCompilerFailed"))
    draft = author(tmp_path, "refusing_tanh").drafts(Stage("local", "refusing_tanh"), blamed)[0]
    assert exit_code(draft) == 1
    printed = capsys.readouterr()
    assert "ArithmeticError: no tanh here" in printed.err
    assert "the difference appears: eager runs, compiled code does not" in printed.out


def test_a_segment_that_is_right_shows_no_difference(tmp_path: Path, fresh_dynamo: None) -> None:
    blamed = segment(TRAINED)
    right, wrong = (
        author(tmp_path, backend).drafts(Stage("local", backend), blamed)[0]
        for backend in ("aot_eager", "scaling_tanh")
    )
    assert (exit_code(right), exit_code(wrong)) == (0, 1)


@pytest.mark.parametrize("mode", ["local", "torch"])
def test_a_model_that_is_right_shows_no_difference_without_ddp_and_with(
    tmp_path: Path, mode: str, one_rank_group: None, fresh_dynamo: None
) -> None:
    before = torch.random.get_rng_state()
    draft = author(tmp_path, "aot_eager").drafts(Stage(mode, "aot_eager"), Blamed(()))[0]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert exit_code(draft) == 0


def test_a_script_draws_the_random_numbers_that_eager_draws(
    tmp_path: Path, one_rank_group: None, fresh_dynamo: None
) -> None:
    blamed = segment(torch.ones(4, 8, requires_grad=True), "torch.nn.functional.dropout")
    writer = author(tmp_path, "inductor", f"{MODULE}:dropping")
    drafts = writer.drafts(Stage("torch", "inductor"), blamed)
    alone = {draft.kind: draft for draft in drafts if "without ddpopt" in draft.kind and not draft.tensors}
    assert len(alone) == 2
    for draft in alone.values():
        assert exit_code(draft) == 0, draft.kind


@pytest.mark.parametrize(
    ("target", "symptom"),
    [("cap_below_1", Symptom("run", "AssertionError")), ("sequential", Symptom("structure"))],
)
def test_failures_of_ddp_compiled_by_torch_show_in_one_process(
    tmp_path: Path, target: str, symptom: Symptom, one_rank_group: None, fresh_dynamo: None
) -> None:
    blamed = Blamed((), symptom=symptom)
    draft = author(tmp_path, "eager", target).drafts(Stage("torch", "eager"), blamed)[0]
    assert draft.kind == "the model under DDP"
    assert exit_code(draft) == 1
