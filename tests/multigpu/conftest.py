"""Every test of this folder runs on ranks, by the plugin that users have too.

Without a ``world_size`` marker a test runs on torchrun's ranks, however many there are, or on as many as
``DDPOPT_NPROC`` says (default 2); with one, on no fewer than it names.

``alone/`` tests how ranks are started, followed and ended; these tests start their own, the same on any
number of ranks: on more than two they run at night only.

Invariant: a test marked ``one_process``, and each in ``alone/``, runs once, in one process without a process
group: of torchrun's ranks in the first.
"""

from pathlib import Path

import pytest

from ddpopt.ranks.environment import launched_ranks, own_rank
from ddpopt.testing import Ranks
from tests.support.turns import DEFAULT_RANKS, number_of_ranks

FOLDER = Path(__file__).parent
ALONE = FOLDER / "alone"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_process: the test runs in one process, without ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    launched = launched_ranks() is not None
    at_least = 1 if launched else number_of_ranks()
    for item in items:
        if FOLDER not in item.path.parents:
            continue
        if ALONE in item.path.parents:
            item.add_marker(pytest.mark.one_process)
            if number_of_ranks() > DEFAULT_RANKS:
                item.add_marker(pytest.mark.nightly)
        if item.get_closest_marker("one_process") is None:
            add_ranks(item, at_least)
        elif launched and own_rank() > 0:
            item.add_marker(pytest.mark.skip(reason="the first rank runs it"))


def add_ranks(item: pytest.Item, at_least: int) -> None:
    own = item.get_closest_marker("world_size")
    size = at_least if own is None else max(at_least, *own.args)
    item.add_marker(pytest.mark.world_size(size, **({} if own is None else own.kwargs)), append=False)


@pytest.fixture
def ranks(ddp_ranks: Ranks) -> Ranks:
    """The ranks of this test, with a process group of its own as the default one."""
    return ddp_ranks
