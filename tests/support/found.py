"""The failures that fuzzing found, made small: ``tests/data/found`` has a file for each, with what fails.

What was a fault of ddpopt's is mended; what is torch's own is shown by the script that
`ddpopt.fuzz.scripting` writes of it.
"""

import functools
from pathlib import Path

import torch
from hypothesis import event

from ddpopt.fuzz.cases import FoundCase, task_of
from ddpopt.fuzz.examine import examine
from ddpopt.fuzz.questions import Answer, Outcome, Setting
from ddpopt.ranks.group import Ranks
from ddpopt.testing.drawn import DrawnModel

OURS = ("ddpopt-split", "ddpopt-inline")
AOT = Setting("aot_eager")
FOLDER = Path(__file__).parents[1] / "data" / "found"


@functools.cache
def found_cases() -> tuple[FoundCase, ...]:
    """Return all failures, by name of the file."""
    return tuple(FoundCase.read(file) for file in sorted(FOLDER.glob("*.json")))


def examined(ranks: Ranks, model: DrawnModel, *modes: str, setting: Setting = AOT) -> list[Answer]:
    """How a model ends in some modes, as the fuzzer tells it."""
    return examine(ranks, task_of(model, modes, setting), lambda _: None)


def fails_undivided(case: FoundCase) -> bool:
    """Whether the model fails under ``aot_eager`` in one piece, so that no optimizer can get it right."""
    return case.kind is Outcome.BACKEND and case.setting.backend in ("eager", "aot_eager")


def assert_right(drawn: DrawnModel, answers: list[Answer]) -> None:
    """Require eager DDP's step of each mode, where torch alone can compile the model in one piece."""
    for answer in answers:
        event(answer.kind)
        right = answer.kind in (Outcome.OK, Outcome.BACKEND) or fails_in_eager(drawn, answer)
        assert right or answer.detail.startswith("nothing was judged"), answer


def fails_in_eager(drawn: DrawnModel, answer: Answer) -> bool:
    """Whether DDP of torch 2.11 writes into buffers that an earlier forward saved for its backward."""
    is_known = torch.__version__ < "2.12" and {"norm-with-buffers", "several-forwards"} <= drawn.features
    return is_known and answer.kind is Outcome.EAGER and "modified by an inplace operation" in answer.detail
