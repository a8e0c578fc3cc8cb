"""Fixtures that several unit tests share."""

import logging
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What ddpopt logs from INFO on, with the level; also what it had said before."""
    from ddpopt.graph import artifacts  # heavy, and not needed to collect tests

    artifacts.say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="ddpopt"):
        yield lambda: [f"{r.levelname}: {r.getMessage()}" for r in caplog.records if r.name == "ddpopt"]
