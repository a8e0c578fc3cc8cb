"""Say why one rank takes another way than its peers: the branch in the user's code, and its inputs.

Both ranks take the step once more, uncompiled, and every line of the program that runs is noted; the last
line that both have in common is the branch. Invariant: nothing is guessed; where both run the same
lines, no branch is named.
"""

import contextlib
import linecache
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torch import Tensor

from ddpopt.judge.simulation.world import is_of_program
from ddpopt.judge.training.values import form_of, leaves

Line = tuple[str, int, str]
"""File, number and function."""
SHOWN = 3
FEW = 4
"""Elements of an input that is shown with its values."""


@contextlib.contextmanager
def noting_lines(lines: list[Line]) -> Iterator[None]:
    """A block in which every line of the program that runs is added to a list, in order."""

    def note(frame: FrameType, event: str, _: Any) -> Any:
        if not is_of_program(frame.f_code.co_filename):
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        yield
    finally:
        sys.settrace(before)


def branch(theirs: Sequence[Line], ours: Sequence[Line]) -> str:
    """The line after which two ranks run different lines; empty if they run the same."""
    common = 0
    while common < min(len(theirs), len(ours)) and theirs[common] == ours[common]:
        common += 1
    parted = [lines[common] for lines in (theirs, ours) if common < len(lines)]
    functions = {(file, function) for file, _, function in parted}
    for file, number, function in reversed(theirs[:common]):
        if (file, function) in functions:  # and not in a function that this line has called
            text = linecache.getline(file, number).strip()
            return f"{file}:{number} in {function}: {text}"
    return ""


def unlike_inputs(theirs: Any, ours: Any) -> str:
    """How the arguments of two ranks' forwards differ."""
    mine = dict(_described(theirs))
    others = dict(_described(ours))
    unlike = [name for name in mine | others if mine.get(name) != others.get(name)]
    if not unlike:
        return "inputs of the same form"
    told = [f"{name} is {mine.get(name, 'missing')} and not {others.get(name, 'missing')}" for name in unlike]
    more = f", and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return f"other inputs: {', '.join(told[:SHOWN])}{more}"


def _described(call: Any) -> Any:
    args, kwargs = call
    for name, value in (*enumerate(args), *kwargs.items()):
        for path, leaf in leaves(value, f"input {name}"):
            if not isinstance(leaf, Tensor):
                yield path, repr(leaf)
            elif leaf.numel() <= FEW:
                yield path, f"{leaf.detach().tolist()}"
            else:
                yield path, form_of(leaf, with_strides=False)
