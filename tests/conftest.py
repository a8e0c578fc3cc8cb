"""What several folders of tests share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def compiling_quickly() -> Iterator[None]:
    """Dynamo does without what nobody reads here, and what costs a third of the time of most tests."""
    from ddpopt.judge.trials import quickly  # heavy, and not needed to collect tests

    with quickly():
        yield
