"""Run the text of a drawn model: its source becomes a module, and the module a case.

Invariant: a program is its source and nothing else, so it can be sent to other processes as text, without the
strategy that drew it or the blocks that wrote it.
"""

import hashlib
import linecache
import sys
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from ddpopt.cases.case import Call, Case


@dataclass(frozen=True)
class Program:
    """The source of a module that defines a model, its inputs and its loss.

    Attributes:
        source: the text of a module with ``make_model``, ``make_inputs``, ``loss`` and ``DDP_KWARGS``.
    """

    source: str

    @property
    def name(self) -> str:
        """Equal for equal sources, and a valid name of a module."""
        return f"drawn_{hashlib.sha256(self.source.encode()).hexdigest()[:12]}"

    @property
    def module(self) -> ModuleType:
        """The source, executed as an importable module: Dynamo imports the modules it inlines from."""
        name = self.name
        if name in sys.modules:
            return sys.modules[name]
        module = ModuleType(name)
        file = module.__file__ = f"<{name}>"
        sys.modules[name] = module  # before it runs, because dataclasses looks up its module
        exec(compile(self.source, file, "exec"), module.__dict__)
        # An entry without a modification time is kept, so tracebacks can show the lines.
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        return module

    def model(self) -> nn.Module:
        """Build the model, with equal weights at every call; the default generator is unchanged."""
        with torch.random.fork_rng(devices=()):
            model: nn.Module = self.module.make_model()
        return model

    def inputs(self, rank: int = 0, step: int = 0) -> Call:
        """The arguments of one forward, equal at every call."""
        call: Call = self.module.make_inputs(rank, step)
        return call

    def loss(self, output: object) -> Tensor:
        """The mean of squares over all tensors of an output."""
        value: Tensor = self.module.loss(output)
        return value

    def case(self) -> Case:
        """Make a case that needs only this source."""
        return Case(
            name=self.name,
            model=self.model,
            inputs=self.inputs,
            about=" ".join((self.module.__doc__ or "").partition("\n\n")[0].split()),
            loss=self.module.loss,
            ddp_kwargs=self.module.DDP_KWARGS,
        )
