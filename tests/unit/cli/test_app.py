"""The command: what it prints, where, and with which exit code."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import ddpopt
from ddpopt.cases import corpus
from ddpopt.cases.targets import resolve
from ddpopt.errors import CertificateError, InfrastructureError
from tests.support.commands import run

# not `import ddpopt.explanation.explain`: the facade gives that name to the function
explaining: Any = importlib.import_module("ddpopt.explanation.explain")
TARGETS = """
import sys
import torch
from torch import nn


class Leaving(nn.Linear):
    def forward(self, x):
        sys.exit(0)


def make():
    return nn.Linear(8, 8), torch.ones(2, 8)


def leaving():
    return Leaving(8, 8), torch.ones(2, 8)
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return "mine:make"


# ------------------------------------------------------------------------------------------- right


def test_explain_prints_the_explanation_alone_or_json_in_its_place(target: str, tmp_path: Path) -> None:
    file = tmp_path / "explanation.json"
    explanation = explaining.explain_case(resolve(target), {})
    result = run("explain", target, "--json", str(file))
    assert (result.exit_code, result.stderr, result.stdout) == (0, "", f"{explanation}\n")
    assert file.read_text(encoding="utf-8") == f"{explanation.to_json()}\n"
    result = run("explain", target, "--json", "-")
    assert (result.exit_code, result.stdout) == (0, f"{explanation.to_json()}\n")


@pytest.mark.parametrize(
    ("case", "given", "received"),
    [
        ("tied", ["bucket_cap_mb=0.5", "static_graph=true"], {"bucket_cap_mb": 0.5, "static_graph": True}),
        ("tied", ["bucket_cap_mb_list=3,1,0.5"], {"bucket_cap_mb_list": [3, 1, 0.5]}),
        ("tied", ["broadcast_buffers=False"], {"broadcast_buffers": False}),
        ("unused", ["find_unused_parameters=false"], {"find_unused_parameters": False}),
    ],
)
def test_ddps_arguments_override_the_cases_own(
    case: str, given: list[str], received: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, object]] = []
    monkeypatch.setattr(explaining, "explain_case", lambda _, ddp_kwargs, strategy: found.append(ddp_kwargs))
    run("explain", case, *(word for each in given for word in ("--ddp", each)))
    assert found == [received]


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


def test_the_versions_are_those_of_the_packages() -> None:
    result = run("--version")
    expected = f"ddpopt {ddpopt.__version__}, torch {torch.__version__}\n"
    assert (result.exit_code, result.stdout) == (0, expected)


# ------------------------------------------------------------------------------------------- wrong


@pytest.mark.parametrize("args", [["explain"], ["explain", "--no-such"], ["nosuch"]])
def test_a_command_line_that_does_not_parse_exits_with_2(args: list[str]) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: ddpopt ")


def test_every_error_of_ours_is_a_message_and_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, error in ((1, CertificateError(("a node is lost",))), (3, InfrastructureError("rank 1 died"))):
        monkeypatch.setattr(explaining, "explain_case", Mock(side_effect=error))
        result = run("explain", "linear8")
        assert (result.exit_code, result.stdout) == (code, "")
        assert result.stderr == f"ddpopt: error: {error}\n"
    monkeypatch.setattr(explaining, "explain_case", Mock(side_effect=ZeroDivisionError))
    assert type(run("explain", "linear8").exception) is ZeroDivisionError  # others keep their traceback


def test_a_target_that_ends_the_process_later_is_a_usage_error(target: str) -> None:
    result = run("explain", target.replace("make", "leaving"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("ddpopt: error: the target called sys.exit(0)")
    assert result.stderr.endswith("; make it return instead\n")
