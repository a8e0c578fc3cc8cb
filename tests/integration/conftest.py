"""Tests of whole parts: they compile with Inductor, start processes, or judge models from end to end."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def spared(compiling_quickly: None) -> None:
    """Most of what is here compiles."""
