"""ddpopt.judge.runner: wrong arguments are refused before a rank starts."""

import sys
from typing import Any

import pytest
from expecttest import TestCase

import ddpopt
from ddpopt.errors import UsageError
from ddpopt.judge.modes import MODES
from ddpopt.judge.options import OPTIONS
from ddpopt.judge.runner import _waits_s
from ddpopt.judge.trials import Settings


class TestMessages(TestCase):
    def refused(self, **arguments: Any) -> str:
        with pytest.raises(UsageError) as caught:
            ddpopt.verify(arguments.pop("target", "tied"), **arguments)
        return str(caught.value)

    def test_a_mode_that_does_not_exist(self) -> None:
        message = self.refused(mode="ddpopt")
        assert message.startswith("mode: expected one of eager, manual, torch, whole, ")
        assert message.endswith("got 'ddpopt'; did you mean 'ddpopt-split' or 'ddpopt-inline'?")

    def test_an_option_that_does_not_exist(self) -> None:
        message = self.refused(options="no_synch")
        assert message.startswith("options: expected one of default, static_graph, ")
        assert message.endswith("got 'no_synch'")

    def test_a_strategy_that_does_not_exist(self) -> None:
        self.assertExpectedInline(
            self.refused(strategy="cut"),
            """strategy: expected one of split, inline, auto, got 'cut'""",
        )

    def test_a_backend_that_does_not_exist(self) -> None:
        assert "backend: expected the name of a Dynamo backend, got 'inducter'" in self.refused(
            backend="inducter"
        )

    def test_a_dtype_that_does_not_exist(self) -> None:
        self.assertExpectedInline(
            self.refused(dtype="int64"),
            """dtype: expected a floating-point dtype of torch's, like float32 or bfloat16, got 'int64'""",
        )

    def test_no_ranks(self) -> None:
        self.assertExpectedInline(
            self.refused(nproc=0),
            """nproc: expected a positive number, got 0""",
        )

    def test_no_steps(self) -> None:
        self.assertExpectedInline(
            self.refused(steps=0),
            """steps: expected a positive number, got 0""",
        )

    def test_no_time_for_a_trial(self) -> None:
        self.assertExpectedInline(
            self.refused(trial_limit_s=0.0),
            """trial_limit_s: expected seconds above 0, got 0.0""",
        )

    def test_a_target_that_does_not_exist(self) -> None:
        assert "expected the name of a case in the corpus, got 'nothing'" in self.refused(target="nothing")


def test_the_limit_of_a_trial_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = sys.modules["ddpopt.judge.runner"]  # the package's name is that of the function
    given: list[Settings] = []
    monkeypatch.setattr(runner, "verify_all", lambda title, asked, settings, **_: given.append(settings))
    ddpopt.verify("tied", trial_limit_s=7.0)
    assert [settings.trial_limit_s for settings in given] == [7.0]


def test_ranks_that_exist_wait_for_each_other_longer_than_a_trial_may_take() -> None:
    assert _waits_s(Settings(trial_limit_s=7.0)) == 300
    assert _waits_s(Settings(trial_limit_s=900.0)) == 900


def test_names_of_modes_and_options_are_unique() -> None:
    for table in (MODES, OPTIONS):
        names = [row.name for row in table]
        assert len(names) == len(set(names))
