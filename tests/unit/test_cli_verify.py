"""ddpopt.cli_verify: which process writes the reports."""

import pytest

from ddpopt.cli_verify import is_first


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "1")
    return monkeypatch


def test_a_process_that_torchrun_did_not_start_writes_its_reports_whatever_its_rank(
    environment: pytest.MonkeyPatch,
) -> None:
    assert is_first()


@pytest.mark.parametrize(("rank", "writes"), [("0", True), ("1", False)])
def test_under_torchrun_the_first_rank_alone_writes(
    rank: str, writes: bool, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("TORCHELASTIC_RUN_ID", "some")
    environment.setenv("RANK", rank)
    assert is_first() is writes
