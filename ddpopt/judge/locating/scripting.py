"""Write a script that repeats a verification and shows the difference; it is run once as a check.

Invariant: the script says what was found and how to run it; its exit code says whether the difference
appears. It counts as a reproduction only if, in a fresh interpreter, it exits with 1 and prints that the
difference appears.
"""

import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpopt.judge.engines.modes import LOCAL
from ddpopt.judge.locating.rungs import Known, Question, Stage, Symptom
from ddpopt.ranks.environment import environment_of_no_rank

APPEARS = "the difference appears"
REACHED = "eager is done; compiled:"
"""A script prints this before the expected death; without it, it died for another reason."""
DOES = {"died": "crashes the process ({})", "run": "fails where eager runs"}
"""How a layer differs; any other difference is in numbers or structure."""


def script_of(
    question: Question, stage: Stage, symptom: Symptom, known: Known, layer: str, file: Path, device: str
) -> str:
    """Write a script that repeats the verification of a stage.

    Args:
        question: the trial.
        stage: the lowest rung that disagrees.
        symptom: how it disagrees.
        known: the other results of the search.
        layer: the layer that is wrong, as text.
        file: where the script will be written.
        device: the device of the trial.
    """
    module, _, name = stage.backend.rpartition(":")
    death = symptom.how if symptom.kind == "died" else ""
    folder = Path.cwd()
    return rendered(
        "reproduction.jinja",
        {
            "layer": layer,
            "does": DOES.get(symptom.kind, "does not do what eager does").format(death),
            "question": question,
            "mode": question.mode if stage.mode == LOCAL.name else stage.mode,
            "segments": known.segments,
            "platform": platform,
            "torch_version": torch.__version__,
            "name": file.name,
            "folder": "" if folder == file.absolute().parent else str(folder),
            "module": module,
            "compiler": name if module else repr(name or "eager"),  # a mode may compile nothing
            "ranks": max(stage.ranks, question.rank + 1),  # enough ranks to have the inputs of that rank
            "device": device,
            "death": death,
        },
        "judge/locating",
    )


def rendered(template: str, given: Mapping[str, Any], folder: str) -> str:
    """Render a script template from a folder of this package."""
    environment = Environment(
        loader=PackageLoader("ddpopt", folder),
        autoescape=False,  # these are programs, not pages
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["repr"] = repr
    return re.sub(r"\n{4,}", "\n\n\n", environment.get_template(template).render(given))


def shows(script: Path, ranks: int, limit_s: float, *, death: str = "") -> bool | None:
    """Run a script in a fresh interpreter, or under torchrun.

    Args:
        script: the file.
        ranks: how many processes it needs.
        limit_s: seconds after which it is killed.
        death: name of the signal, or ``"exit code N"``, that ends a process, if that is the difference.

    Returns:
        Whether it exited with 1 and printed that the difference appears; or, if `death` is given, died that
        way after eager was done. None if it did not end in time.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(script)]
    process = subprocess.Popen(
        command,
        env=environment_of_no_rank(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # including its child processes
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if death:
        return REACHED in output and _died(process.returncode, death, output if ranks > 1 else "")
    return process.returncode == 1 and APPEARS in output


def _died(exit_code: int, death: str, told_by_torchrun: str) -> bool:
    """Whether a process died as given, or torchrun reports that one of its ranks did."""
    if told_by_torchrun:
        signs = (f"({death})", f"exitcode  : {death.removeprefix('exit code ')} ")
        return any(sign in told_by_torchrun for sign in signs)
    return death == (signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}")


def command_of(ranks: int) -> str:
    """The command that runs a script on a number of ranks."""
    return "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
