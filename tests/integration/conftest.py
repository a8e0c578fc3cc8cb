"""Tests of whole parts: they train or judge models from end to end, or need an interpreter of their own."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def spared(kept: None) -> None:
    """Most of what is here compiles."""
