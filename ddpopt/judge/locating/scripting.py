"""Writing scripts that show a difference: the segment alone, the model, or the data-parallel step.

A segment's script needs torch alone; a model's imports what the target imports, and ddpopt only where the
target is a case. Invariant: a script says how to run it, and judges as `ddpopt.judge.compare` does.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from torch import Tensor

from ddpopt.cases.case import Case
from ddpopt.dynamo.backend import find_compiler
from ddpopt.judge.judging.arithmetic import CREDIBLE, centred_factor, tail_factor
from ddpopt.judge.judging.rounding import SAMPLES
from ddpopt.judge.locating.known import Blamed
from ddpopt.judge.locating.reproduction import REACHED, Draft, command_of
from ddpopt.judge.locating.rungs import Question, Stage
from ddpopt.judge.locating.segment_code import Code
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
            found += self._of_segment(stage, blamed.code, blamed)
        if stage.mode in (LOCAL.name, *PLAIN_DDP) and self.question.option == "default":
            found.append(self._of_model(stage, blamed))
        if stage.mode != LOCAL.name or not found:
            found.append(self._of_step(stage, blamed))
        return [replace(draft, death=blamed.death) for draft in found]

    def _of_segment(self, stage: Stage, code: Code, blamed: Blamed) -> Iterator[Draft]:
        """With arguments that are drawn, then with the target's module imported too, then with its own."""
        drawn = [given.code() for given in code.given]
        tensors = {
            f"input {given.name}": given.value for given in code.given if isinstance(given.value, Tensor)
        }
        modules = ["", self._module] if self._module not in ("", _module_of_backend(stage.backend)) else [""]
        if None not in drawn:
            for module in modules:
                yield self._segment(stage, code, blamed, drawn, code.tensors, module)
        loaded = [given.loading() for given in code.given]
        yield self._segment(stage, code, blamed, loaded, code.tensors | tensors, modules[-1])

    def _segment(
        self,
        stage: Stage,
        code: Code,
        blamed: Blamed,
        expressions: Sequence[str | None],
        tensors: dict[str, Tensor],
        module: str,
    ) -> Draft:
        text = self._render(
            "segment.jinja",
            stage,
            blamed,
            imports=[*code.imports, *_needed({"from pathlib import Path": bool(tensors)})],
            about=[f"the segment comes from {', '.join(code.lines)}"] if code.lines else [],
            module=module,
            late=[f"import {module}  # it may set up what the model runs in"] if module else [],
            code=code,
            arguments=[(given.name, each) for given, each in zip(code.given, expressions, strict=True)],
            saved=bool(tensors),
            tells_floats=not blamed.crashes,
        )
        return Draft("the segment alone, without DDP and without ddpopt", text, tensors)

    def _of_model(self, stage: Stage, blamed: Blamed) -> Draft:
        made, with_ddp = _made_by_factory(self.question.target), stage.mode in PLAIN_DDP
        factory = self.question.target.partition(":")[2]
        walks = _needed({"tree_leaves": made is not None, "tree_map": blamed.samples})
        imports = {
            "from ddpopt.cases.case import resolve": made is None,
            f"from torch.utils._pytree import {', '.join(walks)}": bool(walks),
            "from torch.nn.parallel import DistributedDataParallel": with_ddp,
            "import os": stage.ranks > 1,
        }
        text = self._render(
            "model.jinja",
            stage,
            blamed,
            imports=_needed(imports),
            late=_needed({f"from {self._module} import {factory} as factory": made is not None}),
            module=self._module,
            call="" if made is None else _call_of(made),
            makes=0 if made is None else len(made),
            tells_floats=made is not None or blamed.samples,
            mode_of_ddp=stage.mode if with_ddp else "",
            learning_rate=LEARNING_RATE,
        )
        kind = "the model under DDP" if with_ddp else "the model, without DDP"
        return Draft(f"{kind}{', without ddpopt' if made is not None else ''}", text, ranks=stage.ranks)

    def _of_step(self, stage: Stage, blamed: Blamed) -> Draft:
        imports = {
            "import torch.distributed as dist": True,
            "from ddpopt.cases.case import resolve": True,
            "from ddpopt.judge.runner import verify_here": True,
            "from ddpopt.judge.option_cases import in_dtype": bool(self.question.dtype),
            "from ddpopt.judge.option_cases import differing": bool(self.question.ddp_kwargs),
            "from dataclasses import replace": stage.ranks == 1 and self.question.rank > 0,
        }
        text = self._render(
            "verify.jinja",
            stage,
            blamed,
            imports=_needed(imports),
            module=self._module,
            judged=self.question.mode if stage.mode == LOCAL.name else stage.mode,
        )
        return Draft("the data-parallel step", text, ranks=stage.ranks)

    def _render(
        self,
        template: str,
        stage: Stage,
        blamed: Blamed,
        *,
        imports: Sequence[str],
        module: str,
        late: Sequence[str] = (),
        about: Sequence[str] = (),
        **more: Any,
    ) -> str:
        question = self.question
        registering = _module_of_backend(stage.backend)
        roots = [_root(each, self.script) for each in (registering, module) if each]
        name = question.backend.partition(":")[2] if ":" in stage.backend else ""
        bringing = {
            f"from {registering} import {name.partition('.')[0]}": bool(name),
            f"import {registering}  # registers the backend": bool(registering and not name),
        }
        traced = _needed({"import traceback": blamed.kind == "run"})
        given = {
            "headline": _headline(stage, blamed),
            "symptom": blamed.kind,
            "exact": blamed.exact,
            "samples": blamed.samples,
            "death": blamed.death,
            "reached": REACHED,
            "python_version": platform.python_version(),
            "platform": platform.platform(terse=True),
            "target": question.target,
            "mode": f"{question.mode}, here without DDP" if stage.mode == LOCAL.name else stage.mode,
            "option": question.option,
            "backend": stage.backend,
            "compiler": name or repr(stage.backend),
            "steps": question.steps,
            "rank": question.rank,
            "dtype": f"torch.{question.dtype}" if question.dtype else "",
            "ddp_kwargs": dict(question.ddp_kwargs),
            "ranks": stage.ranks,
            "command": f"'{command_of(stage.ranks)} {self.script.name}'",
            "about": about,
            "imports": grouped({"import sys", "import torch", *imports, *traced}),
            "folders": [root for root in dict.fromkeys(roots) if root],
            "late": [*_needed(bringing), *late],
            "torch_version": torch.__version__,
        }
        return rendered(template, given | factors() | more)


def _needed(lines: Mapping[str, bool]) -> list[str]:
    return [line for line, is_needed in lines.items() if is_needed]


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


def spaced(text: str) -> str:
    r"""Put two blank lines around what stands at the top level and spans several lines, one elsewhere.

    >>> spaced("a = 1\ndef f():\n    return 1\nb = 2")
    'a = 1\n\n\ndef f():\n    return 1\n\n\nb = 2\n'
    """
    lines: list[str] = []
    blank = False
    for line in text.splitlines():
        if not line.strip():
            blank = True
            continue
        opens = line.startswith(("def ", "class ", "if "))
        closes = bool(lines) and lines[-1].startswith(" ") and not line.startswith((" ", ")", "]", "}"))
        if lines:
            lines += ["", ""] if opens or closes else [""] if blank else []
        lines.append(line)
        blank = False
    return "\n".join([*lines, ""])


def _made_by_factory(target: str) -> tuple[Any, ...] | None:
    """What a function makes: a model and its inputs; None if the target is a case, or makes one."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name, None) if name else None
    if isinstance(found, Case) or not callable(found):
        return None
    with torch.random.fork_rng(devices=()):
        made = found()
    return made if isinstance(made, tuple) else None


def _call_of(made: tuple[Any, ...]) -> str:
    """An expression of the arguments of a forward, from what the factory makes."""
    inputs = made[1]
    if isinstance(inputs, Mapping):
        return "(), dict(inputs)"
    positional = "tuple(inputs)" if isinstance(inputs, (tuple, list)) else "(inputs,)"
    return f"{positional}, {'dict(keywords)' if len(made) > 2 else '{}'}"


def grouped(lines: Iterable[str]) -> list[str]:
    """The standard library, then torch and others, then assignments, with a line between them.

    >>> grouped(["import torch", "from os import path", "inf = float('inf')", "import sys"])
    ['import sys', 'from os import path', '', 'import torch', '', "inf = float('inf')"]
    """
    groups: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for line in sorted(lines, key=lambda line: (line.startswith("from"), line)):
        words = line.split()
        is_import = words[0] in ("import", "from")
        ours = words[1].partition(".")[0] not in sys.stdlib_module_names
        groups[2 if not is_import else 1 if ours else 0].append(line)
    found = [line for group in groups.values() if group for line in ["", *group]]
    return found[1:]


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
    return spaced(environment.get_template(template).render(given))
