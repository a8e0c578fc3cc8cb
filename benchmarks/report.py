"""What every measurement states beside its figures: date, machine, versions, command."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console


def conditions(module: str) -> dict[str, str]:
    """Date, hardware, versions and command of this run.

    Args:
        module: name of the module that was started, for instance ``"benchmarks.planning"``.

    Returns:
        Printable values by their titles.
    """
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def _processor() -> str:
    """The processor's own name where Linux tells it, else its architecture."""
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def wide_console() -> Console:
    """A console for tables; wide enough for them where the output is a file or a pipe."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=140)


def state(console: Console, facts: Mapping[str, str]) -> None:
    """Print `conditions`, one a line."""
    for title, value in facts.items():
        console.print(f"{title}: {value}", markup=False, highlight=False)
