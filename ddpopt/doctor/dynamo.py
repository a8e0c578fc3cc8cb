"""TorchDynamo's records of compilation: frames, graph breaks, failed guards, compile times.

This is the only module of this package that uses private parts of torch: in
``torch._dynamo.utils`` the lists and dictionaries named in `_FILLED` and the deque ``_compilation_metrics``;
``torch._dynamo.callback.callback_handler``; the attribute
``DistributedDataParallel._active_ddp_module``.

Invariant: after `taking_notes` all of these have their previous contents. Compiled code is dropped, as by
``torch._dynamo.reset()``: a caller's own compiled functions are compiled again when they are next called.
"""

import contextlib
import copy
import logging
import os
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch.nn.parallel import DistributedDataParallel

_FILLED = (
    "graph_break_reasons",
    "guard_failures",
    "compilation_time_metrics",
    "cumulative_time_spent_ns",
    "counters",
)
_TORCH = Path(torch.__file__).parent
_DDPOPT = Path(__file__).parents[1]
_MICROSECONDS = 1e-6
_utils: Any = torch._dynamo.utils  # private, and torch does not type all of it


@contextlib.contextmanager
def without_logs_of_torch() -> Iterator[None]:
    """Keep torch's log off stderr, unless the user asked for it with ``TORCH_LOGS``: notes have all of it."""
    loggers = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch")
    ]
    shown = [each for logger in loggers for each in logger.handlers if type(each) is logging.StreamHandler]
    silenced = [] if os.environ.get("TORCH_LOGS") else list(dict.fromkeys(shown))
    levels = [each.level for each in silenced]
    for each in silenced:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(silenced, levels, strict=True):
            each.setLevel(level)


@dataclass(frozen=True)
class Frame:
    """One attempt by Dynamo to compile a Python frame, or a backward that was compiled at its first run.

    Attributes:
        function: name of the frame's function; empty for a backward.
        file: its source file; empty for a backward.
        line: the function's first line.
        recompiled: the guard that failed, if the frame had been compiled before.
        failure: why Dynamo gave up the frame, which then runs in eager; empty if it did not.
        failed_at: file and line where it gave up.
        total_s: seconds from start to end, including the backend.
        backward: whether this is the compilation of a backward.
        step: the training step in which it was compiled.
    """

    function: str
    file: str
    line: int
    recompiled: str
    failure: str
    failed_at: tuple[str, int]
    total_s: float
    backward: bool
    step: int

    @property
    def is_ddps(self) -> bool:
        """Whether the frame belongs to DDP or Dynamo and not to the model."""
        return not self.backward and is_machinery(self.file)


@dataclass(frozen=True)
class Stop:
    """A place where Dynamo ended a graph before the frame's end.

    Attributes:
        reason: Dynamo's message: a title, then indented lines.
        stack: the Python stack there, innermost frame last.
    """

    reason: str
    stack: tuple[traceback.FrameSummary, ...]


@dataclass
class Notes:
    """Dynamo's records; filled when the block ends.

    Attributes:
        frames: every attempt, in order.
        stops: every graph break of the model, in order.
        graphs: the number of compiled graphs.
        begun: the number of frames compiled before each step began.
    """

    frames: tuple[Frame, ...] = ()
    stops: tuple[Stop, ...] = ()
    graphs: int = 0
    begun: list[int] = field(default_factory=list)

    def begin_step(self) -> None:
        """Mark the start of a training step."""
        self.begun.append(len(_utils.get_compilation_metrics()))


def is_machinery(file: str) -> bool:
    """Whether a source file belongs to DDP, Dynamo or ddpopt and not to a model."""
    path = Path(file)
    if path.is_relative_to(_DDPOPT):
        return not path.is_relative_to(_DDPOPT / "cases" / "corpus")
    own = (_TORCH / "_dynamo", _TORCH / "nn" / "parallel", _TORCH / "_compile.py")
    return path.name == "contextlib.py" or any(path.is_relative_to(part) for part in own)


@contextlib.contextmanager
def taking_notes() -> Iterator[Notes]:
    """Reset Dynamo, and record what it does in this block.

    Yields:
        The notes, complete once the block has ended.
    """
    handler = torch._dynamo.callback.callback_handler
    before = {name: copy.copy(getattr(_utils, name)) for name in _FILLED}
    callbacks = list(handler.start_callbacks), list(handler.end_callbacks)
    metrics = _utils._compilation_metrics
    active = DistributedDataParallel._active_ddp_module
    _utils.counters.clear()
    torch._dynamo.reset()
    _utils._compilation_metrics = deque()
    notes = Notes()
    try:
        yield notes
    finally:
        _take_down(notes)
        torch._dynamo.reset()
        _utils._compilation_metrics = metrics
        DistributedDataParallel._active_ddp_module = active
        for name, value in before.items():
            _refill(getattr(_utils, name), value)
        handler.start_callbacks[:], handler.end_callbacks[:] = callbacks


def _take_down(notes: Notes) -> None:
    notes.frames = tuple(
        _frame(metrics, max(sum(begun <= index for begun in notes.begun) - 1, 0))
        for index, metrics in enumerate(_utils.get_compilation_metrics())
    )
    stops = (Stop(stop.reason, tuple(stop.user_stack)) for stop in _utils.graph_break_reasons)
    notes.stops = tuple(stop for stop in stops if not all(is_machinery(f.filename) for f in stop.stack))
    notes.graphs = int(_utils.counters["stats"]["unique_graphs"])


def _refill(container: Any, value: Any) -> None:
    """Restore a container's contents in place, because other modules of torch hold the container itself."""
    container.clear()
    (container.extend if isinstance(value, list) else container.update)(value)


def _frame(metrics: Any, step: int) -> Frame:
    backward = metrics.is_forward is not True
    total = metrics.backward_cumulative_compile_time_us if backward else metrics.duration_us
    return Frame(
        function=metrics.co_name or "",
        file=metrics.co_filename or "",
        line=metrics.co_firstlineno or 0,
        recompiled=metrics.recompile_reason or "",
        failure=metrics.fail_reason or "",
        failed_at=(metrics.fail_user_frame_filename or "", metrics.fail_user_frame_lineno or 0),
        total_s=(total or 0) * _MICROSECONDS,
        backward=backward,
        step=step,
    )
