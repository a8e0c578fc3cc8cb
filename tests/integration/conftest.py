"""Tests of whole parts: they train or judge models from end to end, or need an interpreter or a browser."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def spared(compiling_quickly: None) -> None:
    """Most of what is here compiles."""
