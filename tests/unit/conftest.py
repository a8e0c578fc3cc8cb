"""Fixtures that several unit tests share."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def spared(compiling_quickly: None) -> None:
    """Many a unit is judged by what it compiles."""
