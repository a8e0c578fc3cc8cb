"""ddpopt.judge.trials.runner: wrong arguments are refused before a rank starts."""

from typing import Any

import pytest

import ddpopt
from tests.support.refusals import refusal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "ddpopt"}, "got 'ddpopt'; did you mean 'ddpopt-step' or 'ddpopt-split' or"),
        ({"strategy": "cut"}, "strategy: expected one of split, inline, step, auto, got 'cut'"),
        ({"dtype": "int64"}, "floating-point torch dtype, such as float32 or bfloat16, got 'int64'"),
        ({"nproc": 0}, "nproc: expected a positive number, got 0"),
        ({"trial_limit_s": 0.0}, "trial_limit_s: expected a positive number, got 0.0"),
        ({"target": "nothing"}, "expected the name of a case in the corpus, got 'nothing'"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: dict[str, Any], message: str) -> None:
    assert message in refusal(lambda: ddpopt.verify(**{"target": "tied", **arguments}))
