"""The doctor's reports: of models with one ailment each, and of a healthy one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import distributed as dist
from torch import nn

from ddpopt.cases import corpus
from ddpopt.cases.case import Call, Case
from ddpopt.doctor import Diagnosis, diagnose
from ddpopt.doctor.diagnosis import Advice, Weight
from ddpopt.errors import NotJudgedError
from ddpopt.testing.drawn import DrawnModel, step
from tests.support.commands import run
from tests.support.refusals import refusal


class Healthy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


class Branching(Healthy):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.second(self.first(x))
        if y.mean() > 100:
            y = y / 2
        return y


class Skipping(Healthy):
    """A parameter that is never used, and a layer that is not always."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, skip: bool = False) -> Any:
        x = self.first(x)
        return x if skip else self.second(x)


def case_of(model: Callable[[], nn.Module], inputs: Callable[[int, int], Call] | None = None) -> Case:
    return Case(
        name=getattr(model, "__name__", "model"),
        model=model,
        inputs=inputs or (lambda rank, step: ((torch.ones(4, 8),), {})),
        about="made for a test",
    )


# ------------------------------------------------------------------------------------------- healthy


def test_of_a_healthy_model_it_says_that_there_is_nothing_to_do() -> None:
    diagnosis = diagnose(case_of(Healthy), backend="eager")
    assert not diagnosis.problems
    assert diagnosis.exit_code == 0
    assert not dist.is_initialized()
    told = str(diagnosis).split("\n\n")[1]
    assert told == "Nothing to do: nothing was found that costs overlap or compile time."
    assert diagnosis.unused == ()


# ------------------------------------------------------------------------------------------- graph breaks


def found_of(diagnosis: Diagnosis, topic: str) -> list[Advice]:
    return [finding for finding in diagnosis.findings if finding.topic == topic]


def test_a_graph_break_has_its_reason_its_line_and_dynamos_hint() -> None:
    drawn = DrawnModel((step("linear"), step("graph_break"), step("linear")))
    (finding,) = found_of(diagnose(drawn.case(), backend="eager"), "graph break")
    line = drawn.source.splitlines().index("        torch._dynamo.graph_break()") + 1
    reason = "Call to `torch._dynamo.graph_break()`. The model is compiled as"
    assert finding.what.startswith(f"Graph break at {drawn.program.module.__file__}:{line}: {reason}")
    assert finding.what.endswith("The line: torch._dynamo.graph_break()")
    assert finding.weight is Weight.SLOW
    assert finding.step.startswith("Remove the `torch._dynamo.graph_break()` call. See https://")


def test_a_branch_on_a_tensor_is_called_so_and_has_a_way_out() -> None:
    (finding,) = found_of(diagnose(case_of(Branching), backend="eager"), "graph break")
    assert "Python branches on the value of a tensor" in finding.what
    assert finding.what.endswith("The line: if y.mean() > 100:")
    assert "torch.where" in finding.step


class Printing(Healthy):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        print(float(x.sum()))  # noqa: T201  # it is what breaks the graph
        return self.second(x)


class Abandoned(Healthy):
    def forward(self, x: torch.Tensor) -> Any:
        for layer in (self.first, self.second):
            with torch.no_grad():
                x.sum().item()
            try:
                raise ValueError(x.sum().item())
            except ValueError:
                x = layer(x)
        return x


def drawn(rank: int, step: int) -> Call:
    return (torch.randn(4, 8),), {}


def test_what_follows_from_a_break_is_said_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    (finding,) = diagnose(case_of(Printing, drawn), backend="eager").problems
    assert finding.topic == "graph break"
    assert "The line: print(float(x.sum()))" in finding.what
    reason, recompiled = finding.symptoms
    assert "Failed to trace builtin operator" in reason
    assert "after the graph break at line" in recompiled
    (abandoned, *_) = diagnose(case_of(Abandoned, drawn), backend="eager").problems
    assert abandoned.topic == "graph break"
    assert any("no part of the model is compiled" in each for each in abandoned.symptoms)
    assert "torch/_dynamo" not in capfd.readouterr().err


# ------------------------------------------------------------------------------------------- recompiles


def test_a_recompile_has_its_guard_its_step_and_the_dimension_to_mark() -> None:
    growing = case_of(Healthy, lambda rank, step: ((torch.ones(4 + step, 8),), {}))
    diagnosis = diagnose(growing, backend="eager", steps=4)
    (finding,) = found_of(diagnosis, "recompile")  # Dynamo takes the size for dynamic after the first change
    assert finding.what.startswith(f"forward() ({__file__}:")
    assert "was recompiled once, most recently in step 1, which took" in finding.what
    assert "failed: tensor 'x' size mismatch at index 0. expected 4, actual 5." in finding.what
    assert "torch._dynamo.mark_dynamic(x, 0)" in finding.step


# ------------------------------------------------------------------------------------------- parameters


NEVER = {"never.weight": True, "never.bias": True}
WRONG = [(Weight.WRONG, "parameters")]


def topics(diagnosis: Diagnosis) -> list[tuple[Weight, str]]:
    return [(finding.weight, finding.topic) for finding in diagnosis.problems]


def test_an_unused_parameter_is_wrong_unless_ddp_looks_for_it() -> None:
    diagnosis = diagnose(case_of(Skipping), backend="eager")
    assert {unused.name: unused.always for unused in diagnosis.unused} == NEVER
    assert topics(diagnosis) == WRONG
    assert diagnosis.problems[0].symptoms[0].startswith("Eager DDP fails in step 1, because some parameters")
    assert diagnosis.exit_code == 1


def test_a_parameter_that_some_steps_leave_out_names_rank_and_step_and_compiled_modes_run() -> None:
    at_times = case_of(Skipping, lambda rank, step: ((torch.ones(4, 8), step == 1), {}))
    diagnosis = diagnose(at_times, {"static_graph": True}, backend="eager")
    by_name = {unused.name: unused for unused in diagnosis.unused}
    assert by_name["second.weight"].missing == ((0, 1), (1, 1))
    assert not by_name["second.weight"].always
    assert list(diagnosis.buckets) == ["torch's DDPOptimizer", "ddpopt"]
    assert [each for each in topics(diagnosis) if each[0] is Weight.WRONG] == WRONG


# ------------------------------------------------------------------------------------------- buckets and time


def test_buckets_are_the_running_reducers_and_waiting_ones_are_counted() -> None:
    diagnosis = diagnose(corpus.case("linear8"), backend="aot_eager")
    biases = [f"layers.{n}.bias" for n in range(7, -1, -1)]
    assert [bucket.params[0] for bucket in diagnosis.buckets["ddpopt"]] == biases
    (finding,) = found_of(diagnosis, "buckets")
    assert finding.what.startswith("Under torch's DDPOptimizer 7 of 9 buckets wait for more than one of 8 ")
    document = json.loads(diagnosis.to_json())
    assert [each["what"] for each in document["findings"]] == [each.what for each in diagnosis.findings]
    assert list(document["buckets"]) == list(diagnosis.buckets)
    text = str(diagnosis)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.isascii()


def test_a_crash_of_torchs_optimizer_is_reported_and_ddpopt_runs() -> None:
    diagnosis = diagnose(corpus.case("cap_below_1"), backend="eager")
    (finding,) = diagnosis.problems
    assert (finding.topic, finding.weight) == ("run", Weight.WRONG)
    assert "First bucket should be smaller/equal to other buckets" in finding.what
    assert list(diagnosis.buckets) == ["ddpopt"]


def test_a_module_that_dynamo_steps_over_is_not_compiled_at_all() -> None:
    (finding,) = diagnose(corpus.case("sequential"), backend="eager").problems
    assert finding.what.startswith("Under torch's DDPOptimizer no part of the model is compiled")


# ------------------------------------------------------------------------------------------- options


def test_options_that_disable_overlap_are_found_in_a_run() -> None:
    with torch._dynamo.config.patch(optimize_ddp=False):
        diagnosis = diagnose(corpus.case("linear8"), {"bucket_cap_mb": 100}, backend="eager")
        assert torch._dynamo.config.optimize_ddp is False
    said = " ".join(finding.what for finding in diagnosis.problems if finding.topic == "options")
    assert "optimize_ddp is False" in said
    assert "All gradients, 32.031 MiB, are one bucket" in said


# ------------------------------------------------------------------------------------------- the report


def test_the_process_group_of_the_caller_is_used_and_kept(one_rank_group: None) -> None:
    group: Any = dist.group.WORLD
    diagnose(case_of(Healthy), backend="eager", steps=2, ranks=1)
    assert dist.group.WORLD is group


def test_a_model_that_fails_in_eager_is_not_judged() -> None:
    failing = case_of(Healthy, lambda rank, step: ((torch.ones(4, 7),), {}))
    said, _, where = refusal(lambda: diagnose(failing), NotJudgedError).partition(f" ({__file__}:")
    assert_expected_inline(
        said.replace("addmm: ", ""),  # new in torch 2.15
        """\
Healthy: expected the model to run in eager, without DDP, but with the inputs of rank 0, step 0 it failed \
with RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x7 and 8x8)""",
    )
    assert where.endswith(" in forward); fix that step first")


# ------------------------------------------------------------------------------------------- the command


def test_the_command_prints_the_report_on_stdout_and_progress_on_stderr(tmp_path: Path) -> None:
    file = tmp_path / "diagnosis.json"
    result = run("doctor", "cap_5", "--backend", "eager", "--steps", "2", "--json", str(file))
    assert result.exit_code == 0
    assert result.stdout.startswith("Linears: 2 steps in each mode, backend eager, torch ")
    assert f"{torch.__version__} (supported: torch 2.11 to " in " ".join(result.stdout.split())
    assert [line for line in result.stderr.splitlines() if line.startswith("ddpopt: ")] == [
        "ddpopt: eager, without DDP",
        "ddpopt: eager DDP",
        "ddpopt: torch's DDPOptimizer",
        "ddpopt: ddpopt",
    ]
    assert json.loads(file.read_text(encoding="utf-8"))["steps"] == 2
