"""Most tests of this folder only start processes; a module that compiles asks for ``compiling_quickly``."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def spared() -> None:
    """Nothing: getting ready to compile takes seconds."""
