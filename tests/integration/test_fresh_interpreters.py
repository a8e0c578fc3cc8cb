"""What only a new interpreter shows: what an import brings along, and that nothing hangs on this process."""

import subprocess
import sys
from pathlib import Path

import ddpopt
from tests.commands import run

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = ("testing.plugin", "judge.report.text", "judge.report.junit", "judge.report.html", "cli.app")
LIGHT = f"""
import sys
import ddpopt
names = ddpopt.__all__
for module in {WITHOUT_TORCH}:
    __import__(f"ddpopt.{{module}}")
    print(module, len(names), "torch" in sys.modules)
"""


def test_another_process_with_another_order_of_sets_makes_the_same_plan() -> None:
    command = [sys.executable, "-m", "ddpopt", "explain", "gpt", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stderr, done.stdout) == ("", run("explain", "gpt", "--json", "-").stdout)


def test_pytests_plugin_and_the_reports_import_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{module} {len(ddpopt.__all__)} False" for module in WITHOUT_TORCH]


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
    if not name.endswith(("__main__", "worker_process")):
        importlib.import_module(name)
print(len(names) > 100, state() == before)
"""
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert printed.stdout == "True True\n"
