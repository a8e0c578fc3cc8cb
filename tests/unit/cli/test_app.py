"""The command: what it prints, where, and with which exit code."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from typer.testing import CliRunner

import ddpopt
from ddpopt.cases.case import Case
from ddpopt.cli import app as cli
from ddpopt.cli.verify import Files, Request
from ddpopt.errors import CertificateError, DdpoptError, InfrastructureError
from ddpopt.explanation.result import Explanation
from ddpopt.judge.locate import LIMIT_S as LOCATE_LIMIT_S
from ddpopt.judge.runner import RUN_LIMIT_S
from ddpopt.judge.trials import TRIAL_LIMIT_S
from ddpopt.judge.verdict import Verdict
from ddpopt.planning.plan import Plan
from tests.unit.verdicts import ok_trial, verdict

TARGET = """
import torch
from torch import nn

def make():
    return nn.Linear(8, 8), torch.ones(2, 8)
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
    (tmp_path / "mine.py").write_text(TARGET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return "mine:make"


@pytest.fixture
def module() -> ModuleType:
    # not `import ddpopt.explanation.explain`: the facade gives that name to the function
    return importlib.import_module("ddpopt.explanation.explain")


@pytest.fixture
def explained_with(
    module: ModuleType, target: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[dict[str, object]]]:
    """A target, and a list that receives DDP's arguments in place of explaining anything."""
    received: list[dict[str, object]] = []
    explanation = explain_target(module, target)

    def note(_: Case, ddp_kwargs: dict[str, object]) -> Explanation:
        received.append(ddp_kwargs)
        return explanation

    monkeypatch.setattr(module, "explain_case", note)
    return target, received


def explain_target(module: ModuleType, target: str) -> Explanation:
    case = importlib.import_module("ddpopt.cases.case").resolve(target)
    explanation: Explanation = module.explain_case(case, {})
    return explanation


# ------------------------------------------------------------------------------------------- right


def test_explain_prints_the_explanation_and_nothing_else(target: str, module: ModuleType) -> None:
    result = run("explain", target)
    assert result.exit_code == 0
    assert result.stdout == f"{explain_target(module, target)}\n"
    assert result.stderr == ""


def test_json_on_stdout_takes_the_place_of_the_text(target: str, module: ModuleType) -> None:
    result = run("explain", target, "--json", "-")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert Plan.from_json(json.dumps(document["plan"])) == explain_target(module, target).plan


def test_json_in_a_file_stands_beside_the_text(target: str, module: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "explanation.json"
    result = run("explain", target, "--json", str(file))
    expected = explain_target(module, target)
    assert result.stdout == f"{expected}\n"
    assert file.read_text(encoding="utf-8") == f"{expected.to_json()}\n"


def test_options_become_ddps_arguments(explained_with: tuple[str, list[dict[str, object]]]) -> None:
    target, received = explained_with
    run("explain", target)
    run("explain", target, "--bucket-cap-mb", "0.5", "--static-graph")
    run("explain", target, "--bucket-cap-mb-list", "3,1,0.5", "--no-find-unused-parameters")
    assert received == [
        {},
        {"bucket_cap_mb": 0.5, "static_graph": True},
        {"bucket_cap_mb_list": [3.0, 1.0, 0.5], "find_unused_parameters": False},
    ]


def test_options_take_the_place_of_the_cases_own(
    explained_with: tuple[str, list[dict[str, object]]],
) -> None:
    _, received = explained_with
    run("explain", "unused")
    run("explain", "unused", "--no-find-unused-parameters", "--bucket-cap-mb", "2")
    run("explain", "cap_list")
    run("explain", "cap_list", "--bucket-cap-mb", "2")
    assert received == [
        {"find_unused_parameters": True},
        {"find_unused_parameters": False, "bucket_cap_mb": 2.0},
        {"bucket_cap_mb_list": [3, 1, 1]},
        {"bucket_cap_mb": 2.0},
    ]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Request, Files]]:
    """What 'verify' asks for, in place of verifying anything."""
    received: list[tuple[Request, Files]] = []

    def note(request: Request, files: Files) -> Verdict:
        received.append((request, files))
        return verdict(ok_trial())

    monkeypatch.setattr("ddpopt.cli.verify.run", note)
    return received


REQUEST = Request(
    target="tied",
    nproc=2,
    strategy="auto",
    backend="inductor",
    modes=None,
    options=None,
    steps=3,
    dtype=None,
    device=None,
    limit_s=RUN_LIMIT_S,
    trial_limit_s=TRIAL_LIMIT_S,
    locate=True,
    locate_limit_s=LOCATE_LIMIT_S,
    reproduction=None,
)


def test_verify_without_options_asks_for_the_defaults(requests: list[tuple[Request, Files]]) -> None:
    run("verify", "tied")
    run("verify", "--matrix")
    no_files = Files(None, None, None, github=False)
    assert requests == [(REQUEST, no_files), (replace(REQUEST, target=None, backend="eager"), no_files)]


def test_each_option_of_verify_is_what_is_asked_for(requests: list[tuple[Request, Files]]) -> None:
    told = "--nproc 3 --backend eager --mode torch,whole --options all --steps 5"
    told += " --dtype bfloat16 --device cuda --timeout 60 --no-locate --reproduction mine.py"
    told += " --trial-timeout 7.5 --locate-timeout 5"
    told += " --json a --junit b --html c --github --bucket-cap-mb 2 --static-graph"
    told += " --bucket-cap-mb-list 3,0.5 --no-find-unused-parameters"
    run("verify", "tied", *told.split())
    ddp_kwargs = {
        "bucket_cap_mb": 2.0,
        "bucket_cap_mb_list": [3.0, 0.5],
        "find_unused_parameters": False,
        "static_graph": True,
    }
    request = Request(
        target="tied",
        nproc=3,
        strategy="auto",
        backend="eager",
        modes="torch,whole",
        options="all",
        steps=5,
        dtype="bfloat16",
        device="cuda",
        limit_s=60.0,
        trial_limit_s=7.5,
        locate=False,
        locate_limit_s=5.0,
        reproduction="mine.py",
        ddp_kwargs=ddp_kwargs,
    )
    run("verify", "tied", "--strategy", "split")
    no_files = Files(None, None, None, github=False)
    assert requests == [
        (request, Files("a", "b", "c", github=True)),
        (replace(REQUEST, strategy="split"), no_files),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "split"], "--strategy: has no meaning beside --matrix: its modes say the strategy"),
        (["--bucket-cap-mb", "2"], "--bucket-cap-mb: has no meaning beside --matrix: its options set"),
        (["--bucket-cap-mb-list", "2,1"], "--bucket-cap-mb-list: has no meaning beside --matrix"),
        (["--static-graph"], "--static-graph: has no meaning beside --matrix"),
        (["--no-find-unused-parameters"], "--find-unused-parameters: has no meaning beside --matrix"),
        (["--reproduction", "x.py"], "--reproduction: has no meaning beside --matrix: it does not look"),
        (["--locate-timeout", "9"], "--locate-timeout: has no meaning beside --matrix: it does not look"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_matrix_refuses_what_it_would_ignore(
    requests: list[tuple[Request, Files]], arguments: list[str], words: str
) -> None:
    result = run("verify", "--matrix", *arguments)
    assert (result.exit_code, result.stdout, requests) == (2, "", [])
    assert result.stderr.startswith(f"ddpopt: error: {words}")
    assert result.stderr.endswith("; leave it out\n")


def test_a_strategy_beside_modes_is_refused(requests: list[tuple[Request, Files]]) -> None:
    result = run("verify", "tied", "--mode", "torch", "--strategy", "split")
    assert (result.exit_code, result.stdout, requests) == (2, "", [])
    assert result.stderr == (
        "ddpopt: error: --strategy: has no meaning beside --mode: modes say the strategy, as ddpopt-split "
        "and ddpopt-inline do; leave one of the two out\n"
    )


def test_doctor_does_not_begin_where_its_report_cannot_be_written(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def began(*_: object, **__: object) -> None:
        raise AssertionError("the examination began")

    monkeypatch.setattr(importlib.import_module("ddpopt.doctor"), "diagnose", began)
    result = run("doctor", target, "--json", "no/such/folder/report")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "ddpopt: error: --json: cannot write 'no/such/folder/report'; name a file in a folder that can be "
        "written to\n"
    )


@pytest.mark.parametrize(
    ("args", "got"), [([], "none"), (["tied", "--matrix"], "2"), (["tied", "--matrix", "--self-test"], "3")]
)
def test_verify_is_asked_for_one_thing(
    requests: list[tuple[Request, Files]], args: list[str], got: str
) -> None:
    result = run("verify", *args)
    assert (result.exit_code, result.stdout, requests) == (2, "", [])
    assert result.stderr == (
        f"ddpopt: error: expected one of TARGET, --matrix and --self-test, got {got} of them; "
        "see 'ddpopt verify --help'\n"
    )


def test_cases_lists_every_case_of_the_corpus() -> None:
    result = run("cases")
    assert result.exit_code == 0
    corpus = importlib.import_module("ddpopt.cases.corpus")
    firsts = [line.split(" ")[0] for line in result.stdout.splitlines()[2:]]
    assert [name for name in firsts if name] == [case.name for case in corpus.cases()]


def test_the_version_is_the_packages() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"ddpopt {ddpopt.__version__}\n")


def test_help_names_commands_and_exit_codes() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert_expected_inline(
        result.stdout,
        """\
Usage: ddpopt [OPTIONS] COMMAND [ARGS]...

  Make torch.compile and DistributedDataParallel agree on gradient buckets.

Options:
  --version  Print the version.
  --help     Show this message and exit.

Commands:
  explain   Show the plan, DDP's own buckets, and torch's DDPOptimizer.
  doctor    Say what is in the way of overlap, and what to do about it.
  verify    Compare a compiled data-parallel step with eager DDP.
  gate      Compare plans, runs and ratios with a baseline.
  fuzz      Draw models, and search for one that a mode gets wrong.
  minimize  Make a model that fails small, and write a script that shows it.
  modes     List the modes and options that 'verify' knows.
  cases     List the cases of the corpus.

  Exit codes: 0 right, 1 the program under test is wrong, 2 usage, 3
  infrastructure.
""",
    )


# ------------------------------------------------------------------------------------------- wrong


def test_an_unknown_case_is_a_usage_error_that_lists_those_there_are() -> None:
    result = run("explain", "nosuch")
    assert (result.exit_code, result.stdout) == (2, "")
    start = "ddpopt: error: expected the name of a case in the corpus, got 'nosuch'; there are: gpt, llama, "
    assert result.stderr.startswith(start)


def test_a_module_that_is_not_there_is_a_usage_error() -> None:
    result = run("explain", "no_such_module:make")
    assert result.exit_code == 2
    assert result.stderr == (
        "ddpopt: error: target 'no_such_module:make': there is no module 'no_such_module'; "
        "install it, or add the directory that holds it to PYTHONPATH\n"
    )


def test_a_list_of_caps_that_is_none_is_a_usage_error(target: str) -> None:
    result = run("explain", target, "--bucket-cap-mb-list", "3;1")
    assert result.exit_code == 2
    assert_expected_inline(
        result.stderr,
        """\
ddpopt: error: --bucket-cap-mb-list: expected numbers with commas between, like 3,1,1, got '3;1'
""",
    )


def test_a_cap_that_ddp_would_not_take_is_a_usage_error(target: str) -> None:
    result = run("explain", target, "--bucket-cap-mb", "-1")
    assert result.exit_code == 2
    assert result.stderr == (
        "ddpopt: error: bucket_cap_mb: expected a positive finite number of MiB, got -1.0; "
        "pass what you pass to DDP, or leave it out for DDP's default\n"
    )


def test_a_file_that_cannot_be_written_is_a_usage_error(
    explained_with: tuple[str, list[dict[str, object]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("explain", explained_with[0], "--json", "nowhere/file.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert_expected_inline(
        result.stderr,
        """\
ddpopt: error: --json: cannot write 'nowhere/file.json': No such file or directory; name a file that can be
""",
    )


@pytest.mark.parametrize("args", [["explain"], ["explain", "a", "b"], ["explain", "--no-such"], ["nosuch"]])
def test_a_command_line_that_does_not_parse_exits_with_2(args: list[str]) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: ddpopt ")


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
