"""What each rank does in a verification, as far as it needs no ranks."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo import convert_frame

from ddpopt.judge.judging.failing import Failure
from ddpopt.judge.matrix import CASES
from ddpopt.judge.trials import Settings, _impossible, quickly
from ddpopt.judge.verdict import Status


@contextlib.contextmanager
def entered(x: Tensor) -> Iterator[Tensor]:
    """A context made of something that Dynamo takes for worth a look."""
    yield x


def doubled(x: Tensor) -> Tensor:
    return x * 2


@torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]  # of torch
def not_traced(x: Tensor) -> Tensor:
    """As DDP's forward: Dynamo looks at what it calls."""
    with entered(x) as same:
        return doubled(same)


def compiled_frames() -> list[str]:
    names: list[str] = []
    compile_frame = convert_frame.compile_frame

    def noted(code: object, *args: object, **kwargs: object) -> object:
        names.append(getattr(code, "co_name", "no code"))
        return compile_frame(code, *args, **kwargs)  # type: ignore[arg-type]  # as it came

    torch._dynamo.reset()
    with patch.object(convert_frame, "compile_frame", noted):
        torch.compile(lambda x: not_traced(x), backend="eager")(torch.ones(2))
    torch._dynamo.reset()
    return names


def test_a_spared_process_compiles_no_making_of_a_context_and_still_what_runs_in_it() -> None:
    with quickly():
        pass  # at its end frames are compiled again that the whole run leaves alone
    usual = ["<lambda>", "helper", "__init__", "doubled"]
    assert compiled_frames() == usual
    with quickly():
        assert compiled_frames() == ["<lambda>", "doubled"]
        assert compiled_frames() == ["<lambda>", "doubled"]  # also after torch._dynamo.reset()
    assert compiled_frames() == usual


RAISED = Failure(1, "ValueError: no", refused=False, lost=False)
WAITED = Failure(0, "RuntimeError: Timed out", refused=False, lost=True)


@pytest.mark.parametrize(
    ("waited", "failures", "status", "reason"),
    [
        ("all waited", [], Status.BROKEN, "eager DDP's own runs did not end: all waited"),
        ("", [RAISED], Status.NOT_POSSIBLE, "eager DDP itself fails here: ValueError: no"),
        ("", [WAITED, RAISED], Status.NOT_POSSIBLE, "eager DDP itself fails here: ValueError: no"),
    ],
)
def test_where_eager_ddp_raises_a_trial_is_not_possible_and_where_it_only_waited_broken(
    waited: str, failures: list[Failure], status: Status, reason: str
) -> None:
    bench: Any = SimpleNamespace(stalled=waited, failures=failures)
    trial = _impossible(CASES[0], "join", "whole", bench)
    assert (trial.status, trial.reason) == (status, reason)


def test_a_rank_may_wait_for_most_of_a_trial() -> None:
    assert Settings(trial_limit_s=1000).collective_limit_s == 800
