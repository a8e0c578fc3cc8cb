"""Writing scripts that show a difference: the segment alone, the model, or the data-parallel step.

A segment's script needs torch alone; a model's imports what the target imports, and ddpopt only where the
target is a case. Invariant: a script says how to run it, and judges as `ddpopt.judge.compare` does.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from ddpopt.cases.case import Case
from ddpopt.dynamo.backend import find_compiler
from ddpopt.judge.judging.arithmetic import CREDIBLE, centred_factor, tail_factor
from ddpopt.judge.judging.rounding import SAMPLES
from ddpopt.judge.locating.known import Blamed
from ddpopt.judge.locating.reproduction import REACHED, Draft, command_of
from ddpopt.judge.locating.rungs import Question, Stage
from ddpopt.judge.modes import LOCAL
from ddpopt.judge.training import LEARNING_RATE

PLAIN_DDP = ("torch", "whole")
"""Modes that are DDP and torch.compile, and nothing else."""


@dataclass(frozen=True)
class Author:
    """Writes scripts about one trial.

    Attributes:
        question: the trial.
        script: where they are to stand.
    """

    question: Question
    script: Path

    @property
    def _module(self) -> str:
        """Where the target stands; empty for a case of the corpus."""
        return self.question.target.partition(":")[0] if ":" in self.question.target else ""

    def drafts(self, stage: Stage, blamed: Blamed) -> list[Draft]:
        """Write every script that may show it, the smallest first.

        Args:
            stage: the lowest rung that disagrees.
            blamed: what has to be compiled for it.

        Returns:
            At least one draft.
        """
        found: list[Draft] = []
        if blamed.code is not None:
            alone = "the segment alone, without DDP and without ddpopt"
            if drawn := blamed.code.drawn():
                found.append(Draft(alone, self._text("segment.jinja", stage, blamed, "", drawn=drawn)))
            text = self._text("segment.jinja", stage, blamed, self._module, drawn={})
            found.append(Draft(alone, text, blamed.code.arguments))
        if stage.mode in (LOCAL.name, *PLAIN_DDP) and self.question.option == "default":
            found.append(self._of_model(stage, blamed))
        if stage.mode != LOCAL.name or not found:
            text = self._text("verify.jinja", stage, blamed, self._module)
            found.append(Draft("the data-parallel step", text, ranks=stage.ranks))
        return [replace(draft, death=blamed.death) for draft in found]

    def _of_model(self, stage: Stage, blamed: Blamed) -> Draft:
        is_made, with_ddp = _is_made_by_factory(self.question.target), stage.mode in PLAIN_DDP
        text = self._text(
            "model.jinja",
            stage,
            blamed,
            self._module,
            call=is_made,
            mode_of_ddp=stage.mode if with_ddp else "",
            learning_rate=LEARNING_RATE,
        )
        kind = "the model under DDP" if with_ddp else "the model, without DDP"
        return Draft(f"{kind}{', without ddpopt' if is_made else ''}", text, ranks=stage.ranks)

    def _text(self, template: str, stage: Stage, blamed: Blamed, module: str, **more: Any) -> str:
        """Fill a template of a script that imports a module of the target's."""
        question, registering = self.question, _module_of_backend(stage.backend)
        roots = [_root(each, self.script) for each in (registering, module) if each]
        name = question.backend.partition(":")[2] if ":" in stage.backend else ""
        given = {
            "headline": _headline(stage, blamed),
            "question": question,
            "stage": stage,
            "code": blamed.code,
            "symptom": blamed.kind,
            "exact": blamed.exact,
            "samples": blamed.samples,
            "death": blamed.death,
            "reached": REACHED,
            "platform": platform,
            "torch_version": torch.__version__,
            "is_alone": stage.mode == LOCAL.name,
            "compiler": name or repr(stage.backend),
            "name": name,
            "registering": registering,
            "module": module,
            "folders": [root for root in dict.fromkeys(roots) if root],
            "steps": question.steps,
            "dtype": f"torch.{question.dtype}" if question.dtype else "",
            "ddp_kwargs": dict(question.ddp_kwargs),
            "ranks": stage.ranks,
            "command": f"'{command_of(stage.ranks)} {self.script.name}'",
        }
        return rendered(template, given | factors() | more)


def factors() -> dict[str, float]:
    """How many times eager's own errors one more error may be, as scripts that judge by them are told."""
    known, unknown = tail_factor(SAMPLES), centred_factor(SAMPLES)
    return {
        "factor": round(known, 1),
        "centred_factor": round(unknown, 1),
        "credible": round(CREDIBLE * known),
    }


def _headline(stage: Stage, blamed: Blamed) -> str:
    """The difference in one sentence, as the title of a report."""
    what = "torch.compile" if stage.mode == LOCAL.name else f"The data-parallel mode {stage.mode}"
    if stage.mode in PLAIN_DDP:
        what = "torch.compile of a DDP module"
    who = f"{what} with backend {stage.backend!r}" if stage.backend else what
    return {
        "died": f"{who} takes the process down ({blamed.death}).",
        "run": f"{who} fails where eager runs.",
    }.get(blamed.kind, f"{who} does not compute what eager computes.")


def _is_made_by_factory(target: str) -> bool:
    """Whether a function makes a model and its inputs; else the target is a case, or makes one."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name, None) if name else None
    if isinstance(found, Case) or not callable(found):
        return False
    with torch.random.fork_rng(devices=()):
        return isinstance(found(), tuple)


def _module_of_backend(backend: str) -> str:
    """The module that brings a backend; empty for those that torch has."""
    if not backend:
        return ""
    if ":" in backend:
        return backend.partition(":")[0]
    compiler: Any = find_compiler(backend)
    while isinstance(compiler, partial):
        compiler = compiler.func
    module = str(getattr(compiler, "__module__", "torch"))
    return "" if module.partition(".")[0] in ("torch", "ddpopt", "functools", "__main__") else module


def _root(module: str, script: Path) -> str:
    """The folder that has to be on the path for a module to be found; empty if it is found anyway."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
    if not places or not places[0] or spec is None:
        return ""
    root = Path(places[0]).absolute().parent
    found_anyway = (
        root == script.absolute().parent or str(root).startswith(sys.prefix) or module.startswith("ddpopt.")
    )
    return "" if found_anyway else str(root)


def rendered(template: str, given: Mapping[str, Any], folder: str = "judge/locating/scripts") -> str:
    """Fill a template of this package, or of another folder of ddpopt's that includes some of this one."""
    environment = Environment(
        loader=ChoiceLoader(
            [PackageLoader("ddpopt", each) for each in dict.fromkeys((folder, "judge/locating/scripts"))]
        ),
        autoescape=False,  # these are programs, not pages
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["repr"] = repr
    return re.sub(r"\n{4,}", "\n\n\n", environment.get_template(template).render(given))
