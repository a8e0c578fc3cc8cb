"""Writing scripts that show a difference: the segment alone, the model, or the data-parallel step.

A segment's script needs torch alone; a model's imports what the target imports, and ddpopt only where the
target is a case. Invariant: a script says how to run it, and judges as `ddpopt.verify.compare` does.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from ddpopt.backend import find_compiler
from ddpopt.testing.case import Case
from ddpopt.verify.compare import tail_factor
from ddpopt.verify.modes import LOCAL
from ddpopt.verify.reference import SAMPLES
from ddpopt.verify.reproduction import Draft, command_of
from ddpopt.verify.search import Blamed, Question, Stage
from ddpopt.verify.segment_code import Code
from ddpopt.verify.training import LEARNING_RATE

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
            found += self._of_segment(stage, blamed.code, blamed.exact)
        if stage.mode in (LOCAL.name, *PLAIN_DDP) and self.question.option == "default":
            found.append(self._of_model(stage, blamed.exact))
        if stage.mode != LOCAL.name or not found:
            found.append(self._of_step(stage))
        return [replace(draft, dies=blamed.dies) for draft in found]

    def _of_segment(self, stage: Stage, code: Code, exact: bool) -> Iterator[Draft]:
        """With arguments that are drawn, then with the target's module imported too, then with its own."""
        drawn = [given.code() for given in code.given]
        saved = {
            f"input {given.name}": given.value for given in code.given if isinstance(given.value, Tensor)
        }
        loaded = [
            f"SAVED[{'input ' + given.name!r}].requires_grad_({given.requires_grad})"
            if isinstance(given.value, Tensor)
            else repr(given.value)
            for given in code.given
        ]
        modules = ["", self._module] if self._module not in ("", _module_of_backend(stage.backend)) else [""]
        if None not in drawn:
            for module in modules:
                yield self._segment(stage, code, exact, drawn, code.tensors, module)
        yield self._segment(stage, code, exact, loaded, code.tensors | saved, modules[-1])

    def _segment(
        self,
        stage: Stage,
        code: Code,
        exact: bool,
        expressions: Sequence[Any],
        tensors: dict[str, Tensor],
        module: str,
    ) -> Draft:
        arguments = [
            {"name": given.name, "expression": expression}
            for given, expression in zip(code.given, expressions, strict=True)
        ]
        text = self._render(
            "segment.jinja",
            stage,
            1,
            imports=code.imports + (["from pathlib import Path"] if tensors else []),
            about=[f"the segment comes from {', '.join(code.lines)}"] if code.lines else [],
            module=module,
            late=[f"import {module}  # it may set up what the model runs in"] if module else [],
            exact=exact,
            classes=code.classes,
            chosen=code.chosen,
            arguments=arguments,
            saved=bool(tensors),
            values_saved=any("SAVED" in str(expression) for expression in expressions),
            strided=any("strided(" in str(expression) for expression in expressions),
        )
        return Draft("the segment alone, without DDP and without ddpopt", text, tensors)

    def _of_model(self, stage: Stage, exact: bool) -> Draft:
        imports = ["from torch.utils._pytree import tree_leaves, tree_map"]
        late: list[str] = []
        factory = _is_plain_factory(self.question.target)
        if factory:
            late.append(f"from {self._module} import {self.question.target.partition(':')[2]} as factory")
        else:
            imports.append("from ddpopt.testing.case import resolve")
        with_ddp = stage.mode in PLAIN_DDP
        if with_ddp:
            imports += ["from torch.nn.parallel import DistributedDataParallel"]
        if stage.ranks > 1:
            imports += ["import os"]
        text = self._render(
            "model.jinja",
            stage,
            stage.ranks,
            imports=imports,
            late=late,
            module=self._module,
            exact=exact,
            factory=factory,
            mode_of_ddp=stage.mode if with_ddp else "",
            learning_rate=LEARNING_RATE,
        )
        kind = "the model under DDP" if with_ddp else "the model, without DDP"
        return Draft(f"{kind}{', without ddpopt' if factory else ''}", text, ranks=stage.ranks)

    def _of_step(self, stage: Stage) -> Draft:
        imports = [
            "import torch.distributed as dist",
            "from ddpopt.testing.case import resolve",
            "from ddpopt.verify.runner import verify_here",
        ]
        if self.question.dtype:
            imports.append("from ddpopt.verify.option_cases import in_dtype")
        if self.question.ddp_kwargs:
            imports.append("from ddpopt.verify.option_cases import differing")
        if stage.ranks == 1 and self.question.rank:
            imports.append("from dataclasses import replace")
        text = self._render(
            "verify.jinja",
            stage,
            stage.ranks,
            imports=imports,
            module=self._module,
            judged=self.question.mode if stage.mode == LOCAL.name else stage.mode,
        )
        return Draft("the data-parallel step", text, ranks=stage.ranks)

    def _render(
        self,
        template: str,
        stage: Stage,
        ranks: int,
        *,
        imports: Sequence[str],
        late: Sequence[str] = (),
        about: Sequence[str] = (),
        module: str,
        **more: Any,
    ) -> str:
        question = self.question
        registering = _module_of_backend(stage.backend)
        roots = [_root(each, self.script) for each in (registering, module) if each]
        registers = [f"import {registering}  # registers the backend"] if registering else []
        text = (
            _environment()
            .get_template(template)
            .render(
                target=question.target,
                mode=f"{question.mode}, here without DDP" if stage.mode == LOCAL.name else stage.mode,
                option=question.option,
                backend=stage.backend,
                steps=question.steps,
                rank=question.rank,
                dtype=f"torch.{question.dtype}" if question.dtype else "",
                ddp_kwargs=dict(question.ddp_kwargs),
                ranks=ranks,
                command=f"'{command_of(ranks)} {self.script.name}'",
                about=about,
                imports=sorted({"import sys", "import torch", *imports}, key=_import_order),
                folders=[root for root in dict.fromkeys(roots) if root],
                late=[*registers, *late],
                torch_version=torch.__version__,
                factor=round(tail_factor(SAMPLES), 1),
                **more,
            )
        )
        return spaced(text)


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


def _is_plain_factory(target: str) -> bool:
    """Whether a target is a function that returns a model and its inputs, and no case."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name, None) if name else None
    if isinstance(found, Case) or not callable(found):
        return False
    with torch.random.fork_rng(devices=()):
        return not isinstance(found(), Case)


def _import_order(line: str) -> tuple[bool, bool, str]:
    """Assignments after imports, torch and others after the standard library."""
    words = line.split()
    is_import = words[0] in ("import", "from")
    return not is_import, words[1].partition(".")[0] not in sys.stdlib_module_names, line


def _module_of_backend(backend: str) -> str:
    """The module that registers a backend; empty for those that torch has."""
    if not backend:
        return ""
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


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ddpopt", "verify/scripts"),
        autoescape=False,  # these are programs, not pages
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["repr"] = repr
    return environment
