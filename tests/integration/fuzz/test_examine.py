"""Judging one model: whose failure it is, and that it fails nothing else."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.questions import Outcome, Setting
from ddpopt.fuzz.signatures import FailureSignature
from ddpopt.ranks.group import Ranks
from ddpopt.testing.drawn import DrawnModel, step
from tests.support.found import examined

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")
FAILURE = FailureSignature("error", "AssertionError", "distributed.py in __init__")
SMALL = DrawnModel(width=4, cap_bytes=1)  # torch's optimizer takes no cap below 1 MiB
CASE = FoundCase(SMALL, "torch", Setting("eager", steps=1, lowers_limit=False), FAILURE)


def test_an_exception_is_attributed_to_the_mode_and_leaves_no_module_active(alone: Ranks) -> None:
    (answer,) = examined(alone, CASE.model, "torch", setting=CASE.setting)
    assert (answer.kind, answer.signature) == (Outcome.WRONG, FAILURE)
    assert CASE.fails_so(answer)
    assert DistributedDataParallel._active_ddp_module is None


OPEN = (
    FailureSignature("error", "NotImplementedError", "collect_metadata_analysis.py in inner")
    if torch.__version__ >= "2.12"
    else FailureSignature("error", "RuntimeError", "eval_frame.py in compile_wrapper")
)
"""How torch's optimizer fails inside a transform."""


def test_what_torch_leaves_open_when_it_fails_inside_a_transform_fails_nothing_else(alone: Ranks) -> None:
    inside = DrawnModel((step("transformed", by="grad"),), width=4, cap_bytes=1)
    torchs, ours = examined(alone, inside, "torch", "ddpopt-split", setting=Setting("aot_eager", steps=1))
    assert torchs.signature == OPEN
    assert ours.kind is Outcome.OK
