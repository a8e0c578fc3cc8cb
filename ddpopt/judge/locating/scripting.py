"""A script that shows a difference: it verifies again what the search found.

Invariant: it says what was found, and how to run it; its exit code says whether the difference appears.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpopt.judge.locating.known import Known
from ddpopt.judge.locating.rungs import Question, Stage, Symptom
from ddpopt.judge.modes import LOCAL

DOES = {"died": "takes the process down ({})", "run": "fails where eager runs"}
"""How a layer differs; all else is numbers, or structure."""


def script_of(
    question: Question, stage: Stage, symptom: Symptom, known: Known, layer: str, file: Path, device: str
) -> str:
    """Write a script that verifies a stage again.

    Args:
        question: the trial.
        stage: the lowest rung that disagrees.
        symptom: how it does.
        known: what else the search found.
        layer: which layer is wrong, in words.
        file: where the script is to stand.
        device: what the trial ran on.
    """
    module, _, name = stage.backend.rpartition(":")
    death, folder = symptom.how if symptom.kind == "died" else "", Path.cwd()
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
            "compiler": name if module else repr(name),
            "ranks": max(stage.ranks, question.rank + 1),  # the inputs of a rank take as many
            "device": device,
            "death": death,
        },
        "judge/locating",
    )


def rendered(template: str, given: Mapping[str, Any], folder: str) -> str:
    """Fill a template of a script, in a folder of this package."""
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
