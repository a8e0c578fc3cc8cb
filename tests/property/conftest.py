"""Fixtures of the properties that compile."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def spared(kept: None) -> None:
    """Most properties compile each example."""
