"""Writing a script that shows a difference: the guilty segment alone, or the data-parallel step.

A segment's script needs torch alone, and judges as `ddpopt.judge.compare` does; the other one asks
`ddpopt.verify` again. Invariant: a script says how to run it, and what stays on disk is the first that showed
the difference in a fresh interpreter, or else the last one.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from ddpopt.dynamo.backend import find_compiler
from ddpopt.judge.judging.arithmetic import CREDIBLE, centred_factor, tail_factor
from ddpopt.judge.judging.rounding import SAMPLES
from ddpopt.judge.locating.known import Blamed
from ddpopt.judge.locating.reproduction import REACHED, command_of, shows
from ddpopt.judge.locating.rungs import Question, Stage, Symptom
from ddpopt.judge.modes import LOCAL

SCRIPTS = "judge/locating/scripts"
DOES = {"died": "takes the process down ({})", "run": "fails where eager runs"}
"""How a layer differs; all else is numbers, or structure."""


@dataclass(frozen=True)
class Draft:
    """A script that is yet to be tried.

    Attributes:
        kind: what it runs.
        text: its source code.
        death: name of the signal or exit code of which its process dies, if that is the difference.
    """

    kind: str
    text: str
    death: str = ""


@dataclass(frozen=True)
class Written:
    """What is on disk.

    Attributes:
        script: name of the file; empty if none was written.
        reproduces: whether it showed the difference in a fresh interpreter.
        note: what a reader should know of it.
    """

    script: str = ""
    reproduces: bool = False
    note: str = ""


def write(script: Path, drafts: Sequence[Draft], time_left: Callable[[], float]) -> Written:
    """Write the first draft that shows the difference.

    Args:
        script: where to.
        drafts: in order of preference.
        time_left: how much time is left for trying, in seconds.

    Returns:
        What is on disk now.

    Raises:
        OSError: a script cannot be written, or no process can be started.
    """
    written = Written()
    for draft in drafts:
        script.write_text(draft.text, encoding="utf-8")
        written = Written(script.name, note=f"the script runs {draft.kind}")
        if time_left() <= 0:
            return Written(script.name, note=f"{written.note}; no time was left to run it")
        if shows(script, 1, time_left(), death=draft.death):
            return Written(script.name, True, written.note)
    return written


def drafts_of(
    question: Question, stage: Stage, symptom: Symptom, blamed: Blamed, layer: str, script: Path
) -> list[Draft]:
    """Write every script that may show a difference, the smallest first.

    Args:
        question: the trial.
        stage: the lowest rung that disagrees.
        symptom: how it does.
        blamed: what has to be compiled for it.
        layer: which layer is wrong, in words.
        script: where they are to stand.
    """
    death = symptom.how if symptom.kind == "died" else ""
    module, _, name = stage.backend.rpartition(":")
    folder = Path.cwd()
    given = {
        "layer": layer,
        "does": DOES.get(symptom.kind, "does not do what eager does").format(death),
        "question": question,
        "stage": stage,
        "mode": question.mode if stage.mode == LOCAL.name else stage.mode,
        "segments": blamed.segments,
        "platform": platform,
        "torch_version": torch.__version__,
        "command": f"'{command_of(1)} {script.name}'",
        "folder": "" if folder == script.absolute().parent else str(folder),
        "module": module,
        "compiler": name if module else repr(name),
        "registering": "" if module or not name else _module_of(name),
        "death": death,
        "reached": REACHED,
    }
    found = []
    if blamed.code is not None:
        samples = not blamed.exact and symptom.kind not in ("died", "run")
        alone = {"code": blamed.code, "symptom": symptom.kind, "exact": blamed.exact, "samples": samples}
        text = rendered("segment.jinja", given | alone | factors())
        found.append(Draft("the segment alone, without DDP and without ddpopt", text, death))
    ranks = max(stage.ranks, question.rank + 1)  # the inputs of a rank take as many
    text = rendered("verify.jinja", given | {"ranks": ranks})
    return [*found, Draft(f"the data-parallel step, on {ranks} rank(s) that it starts", text)]


def _module_of(backend: str) -> str:
    """The module that brings a backend; empty for those that torch has."""
    module = str(getattr(find_compiler(backend), "__module__", "torch"))
    return "" if module.partition(".")[0] in ("torch", "ddpopt", "functools", "__main__") else module


def factors() -> dict[str, float]:
    """How many times eager's own errors one more error may be, as scripts that judge by them are told."""
    known, unknown = tail_factor(SAMPLES), centred_factor(SAMPLES)
    return {
        "factor": round(known, 1),
        "centred_factor": round(unknown, 1),
        "credible": round(CREDIBLE * known),
    }


def rendered(template: str, given: Mapping[str, Any], *folders: str) -> str:
    """Fill a template of this package, or of other folders of ddpopt's that include some of this one."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("ddpopt", folder) for folder in (*folders, SCRIPTS)]),
        autoescape=False,  # these are programs, not pages
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["repr"] = repr
    return re.sub(r"\n{4,}", "\n\n\n", environment.get_template(template).render(given))
