"""What only a new interpreter shows: what an import brings along, and that nothing hangs on this process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ddpopt
from tests.support.commands import python

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = (
    "ddpopt.testing.plugin, ddpopt.judge.report.text, ddpopt.judge.report.junit, ddpopt.judge.report.html, "
    "ddpopt.cli.app"
)
STACK = """
import atexit, os
import torch
from torch import nn

print("imported", flush=True)
if __name__ == "test":
    atexit.register(print, "left")

def make():
    os.system("echo called")
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(3))), torch.ones(4, 128)
"""


def test_another_process_finds_the_target_in_its_directory_and_makes_the_same_plan(tmp_path: Path) -> None:
    for name in ("typer", "rich", "torch", "cases", "random"):  # packages that are used, and not these files
        (tmp_path / f"{name}.py").write_text("raise RuntimeError(__file__)")
    (tmp_path / "test.py").write_text(STACK)  # but the target, and not the standard library's
    for options in ("-P -m", "-m"):  # -P: without the current directory, as the installed script starts
        words = f"{options} ddpopt explain test:make --ddp bucket_cap_mb=0.05 --json -"
        done = python(*words.split(), folder=tmp_path, PYTHONHASHSEED="12345")
        # once each, and not on stdout
        assert (done.returncode, done.stderr.split()) == (0, ["imported", "called", "left"])
    made: dict[str, Any] = {}
    exec(STACK, made)
    plan = ddpopt.plan(*made["make"](), bucket_cap_mb=0.05)
    assert json.loads(done.stdout)["plan"]["fingerprint"] == plan.fingerprint


def test_a_result_that_stdout_does_not_take_is_written_and_the_reason_told(tmp_path: Path) -> None:
    command = f"{sys.executable} -m ddpopt cases --json cases.json > /dev/full"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    told = "ddpopt: error: cannot write to stdout: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, told)
    assert "gpt" in json.loads((tmp_path / "cases.json").read_text())


def test_only_a_step_in_one_graph_needs_the_private_names_that_older_releases_lack() -> None:
    code = (
        "import sys, ddpopt.judge.trials.runner; from ddpopt import observe, train_step; print(*sys.modules)"
    )
    loaded = python("-c", code).stdout.split()
    assert "ddpopt.step.api" in loaded
    assert not {"ddpopt.step.tracing", "ddpopt.step.train"} & {*loaded}


@pytest.mark.nightly
def test_commands_that_start_together_do_not_disturb_each_other(tmp_path: Path) -> None:
    (tmp_path / "test.py").write_text(STACK)  # which the ranks must find too
    words = "ddpopt verify test:make --steps 1 --backend eager --ddp bucket_cap_mb=1"
    command = [sys.executable, "-m", *words.split()]
    starts = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    told = [each.communicate(timeout=500)[0] for each in starts]
    assert [each.returncode for each in starts] == [0] * 6, told


def test_pytests_plugin_and_the_reports_import_no_torch() -> None:
    code = f"import sys, {WITHOUT_TORCH}; assert ddpopt.__all__ and 'torch' not in sys.modules"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_importing_every_module_of_ddpopt_changes_nothing_in_torch() -> None:
    program = """
import importlib, pkgutil, sys, torch, torch._dynamo, torch._inductor.config, torch.distributed
from torch._dynamo.backends import distributed
from torch._dynamo import convert_frame
def state():
    torchs = (distributed, distributed.DDPOptimizer, convert_frame, torch.nn.parallel.DistributedDataParallel)
    configs = (torch._dynamo.config, torch._inductor.config, torch._functorch.config)
    return [dict(vars(thing)) for thing in torchs] + [config.get_config_copy() for config in configs]
before = state()
import ddpopt
names = [m.name for m in pkgutil.walk_packages(ddpopt.__path__, "ddpopt.") if "found." not in m.name]
for name in names:
    has_steps = torch.__version__ >= "2.13" or not name.startswith("ddpopt.step.")
    if has_steps and not name.endswith(("__main__", "worker_process")):
        importlib.import_module(name)
print(len(names) > 100, state() == before)
"""
    assert python("-c", program, folder=ROOT).stdout == "True True\n"


DISTRIBUTED_AUTOGRAD = """
import tempfile
import torch, ddpopt
import torch.distributed as dist
from torch.distributed import autograd, rpc
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with tempfile.NamedTemporaryFile() as file:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file.name}")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
for strategy in ("split", "inline"):
    ddp = DistributedDataParallel(net, bucket_cap_mb=1e-4)
    call = ddpopt.compile(ddp, backend="aot_eager", strategy=strategy)
    with autograd.context() as context:
        try:
            autograd.backward(context, [call(torch.ones(2, 8)).sum()])
        except ddpopt.errors.UnsupportedError as error:
            print(error)
        print(len(autograd.get_gradients(context)))
rpc.shutdown(graceful=False)
dist.destroy_process_group()
"""


def test_distributed_autograd_gets_its_gradients_from_split_and_is_refused_by_inline() -> None:
    done = python("-c", DISTRIBUTED_AUTOGRAD)
    gradients, refusal, none = done.stdout.splitlines()
    assert (gradients, none) == ("4", "0")
    assert refusal.endswith('use ddpopt.compile(..., strategy="split")')


@pytest.mark.parametrize(
    "words",
    [
        ["verify", "gpt", "--nproc", "0"],
        ["verify", "gpt", "--mode", "inlined"],
        ["matrix", "--options", "statik"],
        ["fuzz", "--minutes", "-1"],
        ["gate", "--baseline", "b.json", "--report", "page.pdf"],
        ["tune"],
        ["--nothing"],
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_refused_before_torch_is_imported(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from ddpopt.cli.app import app\n"
        "try:\n"
        f"    app({words!r})\n"
        "except SystemExit as end:\n"
        "    print(end.code, 'torch' in sys.modules, file=sys.__stdout__)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "2 False"
