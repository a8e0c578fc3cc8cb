"""The command: what it prints, where, and with which exit code."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from typer.testing import CliRunner

import ddpopt
from ddpopt.cases import corpus
from ddpopt.cases.case import Case, resolve
from ddpopt.cli import app as cli
from ddpopt.errors import CertificateError, DdpoptError, InfrastructureError
from ddpopt.explanation.result import Explanation
from ddpopt.planning.plan import Plan

TARGETS = """
import sys
import torch
from torch import nn


def make():
    return nn.Linear(8, 8), torch.ones(2, 8)


def leave():
    sys.exit(0)
"""


def run(*args: str) -> Any:  # the type of the runner's results moves with typer's versions
    return CliRunner().invoke(cli.app, args, prog_name="ddpopt")


class Leaving(nn.Module):
    """Ends the process."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.exit(0)


def leaving() -> tuple[nn.Module, torch.Tensor]:
    return Leaving(), torch.ones(2)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return "mine:make"


@pytest.fixture
def module() -> ModuleType:
    # not `import ddpopt.explanation.explain`: the facade gives that name to the function
    return importlib.import_module("ddpopt.explanation.explain")


def explained(module: ModuleType, target: str) -> Explanation:
    explanation: Explanation = module.explain_case(resolve(target), {})
    return explanation


# ------------------------------------------------------------------------------------------- right


def test_explain_prints_the_explanation_and_nothing_else(
    target: str, module: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "explanation.json"
    result = run("explain", target, "--json", str(file))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{explained(module, target)}\n"
    assert file.read_text(encoding="utf-8") == f"{explained(module, target).to_json()}\n"


def test_json_on_stdout_replaces_the_text(target: str, module: ModuleType) -> None:
    result = run("explain", target, "--json", "-")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert Plan.from_json(json.dumps(document["plan"])) == explained(module, target).plan


def test_ddps_arguments_override_the_cases_own(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("ddpopt.explanation.explain")
    received: list[dict[str, object]] = []
    explanation = explained(module, target)

    def note(_: Case, ddp_kwargs: dict[str, object]) -> Explanation:
        received.append(ddp_kwargs)
        return explanation

    monkeypatch.setattr(module, "explain_case", note)
    run("explain", target, "--ddp", "bucket_cap_mb=0.5", "--ddp", "static_graph=true")
    run("explain", target, "--ddp", "bucket_cap_mb_list=3,1,0.5", "--ddp", "broadcast_buffers=False")
    run("explain", "unused", "--ddp", "find_unused_parameters=false")
    run("explain", "cap_list", "--ddp", "bucket_cap_mb=2")
    assert received == [
        {"bucket_cap_mb": 0.5, "static_graph": True},
        {"bucket_cap_mb_list": [3, 1, 0.5], "broadcast_buffers": False},
        {"find_unused_parameters": False},
        {"bucket_cap_mb": 2},
    ]


def test_cases_lists_every_case_of_the_corpus() -> None:
    result = run("cases")
    assert result.exit_code == 0
    firsts = [line.split(" ")[0] for line in result.stdout.splitlines()[2:]]
    names = [case.name for case in corpus.cases()]
    assert [name for name in firsts if name] == names
    assert list(json.loads(run("cases", "--json", "-").stdout)) == names


def test_modes_lists_modes_and_options() -> None:
    firsts = {line.partition(" ")[0] for line in run("modes").stdout.splitlines()}
    assert {"torch", "ddpopt-split", "fully_shard", "static_graph", "hook_fp16"} <= firsts


def test_the_version_is_the_packages() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"ddpopt {ddpopt.__version__}\n")


# ------------------------------------------------------------------------------------------- wrong


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "expected the name of a case in the corpus, got 'nosuch'; there are: gpt, llama, "),
        (["gptt"], "; did you mean 'gpt'?"),
        (
            ["no_such_module:make"],
            "target 'no_such_module:make': there is no module 'no_such_module'; install it, or add the "
            "directory that holds it to PYTHONPATH",
        ),
        (
            ["tied", "--ddp", "bucket_cap_mb_list=3;1"],
            "--ddp: expected KEY=VALUE where VALUE is a number, true, false, or numbers with commas between, "
            "got 'bucket_cap_mb_list=3;1'",
        ),
        (["tied", "--ddp", "static_graph"], "--ddp: expected KEY=VALUE where VALUE is a number"),
        (["tied", "--ddp", "static_grap=true"], "; did you mean 'static_graph'?"),
        (
            ["tied", "--ddp", "bucket_cap_mb=-1"],
            "bucket_cap_mb: expected a positive finite number of MiB, got -1; pass what you pass to DDP, or "
            "leave it out for DDP's default",
        ),
        (
            ["tied", "--json", "no/file.json"],
            "--json: cannot write 'no/file.json'; name a file in a folder that can be written to",
        ),
    ],
)
def test_what_cannot_be_used_is_a_usage_error(arguments: list[str], said: str) -> None:
    result = run("explain", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("ddpopt: error: ")
    assert said in result.stderr


@pytest.mark.parametrize("args", [["explain"], ["explain", "a", "b"], ["explain", "--no-such"], ["nosuch"]])
def test_a_command_line_that_does_not_parse_exits_with_2(args: list[str]) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: ddpopt ")


@pytest.mark.parametrize("command", ["explain", "doctor", "verify"])
def test_a_factory_that_ends_the_process_is_a_usage_error_with_its_line(command: str, target: str) -> None:
    result = run(command, target.replace("make", "leave"))
    assert (result.exit_code, result.stdout) == (2, "")
    line = TARGETS.splitlines().index("    sys.exit(0)") + 1
    assert "calling it without arguments failed: SystemExit: 0" in result.stderr
    assert f"mine.py:{line})" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"), [(CertificateError(("a node is lost",)), 1), (InfrastructureError("rank 1 died"), 3)]
)
def test_every_error_of_ours_is_a_message_and_its_own_exit_code(
    error: DdpoptError, code: int, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Explanation:
        raise error

    monkeypatch.setattr(module, "explain_case", fail)
    result = run("explain", "linear8")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == f"ddpopt: error: {error}\n"


def test_a_target_that_ends_the_process_later_is_a_usage_error(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "explain_case", lambda *_: sys.exit(3))
    result = run("explain", "linear8")
    assert result.exit_code == 2
    assert result.stderr.startswith("ddpopt: error: the target ended the process: sys.exit(3)")
    assert_expected_inline(result.stderr.partition("; ")[2], """have it return\n""")


def test_an_error_that_is_not_ours_keeps_its_traceback(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Explanation:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "explain_case", fail)
    assert isinstance(run("explain", "linear8").exception, ZeroDivisionError)


def test_a_target_that_ends_the_process_does_not_end_it_as_if_all_were_right() -> None:
    result = run("explain", f"{__name__}:leaving")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("ddpopt: error: the target ended the process: sys.exit(0)")
    assert result.stderr.endswith("; have it return\n")
