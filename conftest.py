"""What every test run of this repository shares: Hypothesis, inline snapshots, the order under xdist."""

import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.profiles import load_profiles

# HYPOTHESIS_PROFILE, or pytest's --hypothesis-profile: dev, ci or nightly. CI=true gives ci.
load_profiles()

# Else each process that compiles C++ tries out first what the processor can do: seconds for each of its kinds
# of vectors, in processes that import torch.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Else texts that tests hold would be as narrow as the terminal that the tests are run in.
os.environ["COLUMNS"] = "80"
# Older releases of torch lack private names that these modules import, and train_step refuses them.
collect_ignore_glob = ["ddpopt/step/*"] if version("torch") < "2.13" else []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly",
        action="store_true",
        help="also run the tests marked nightly: each is slow and has a shorter counterpart",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "nightly: runs only with --nightly; a shorter test of the same thing always runs"
    )
    config.addinivalue_line("markers", "long: starts before others, so that no worker ends up alone with it")
    if os.environ.get("EXPECTTEST_ACCEPT"):
        # Each process would rewrite the test files, by line number, and so undo the others' edits.
        config.option.tx = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--nightly"):
        later = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]
    # What needs no ranks runs on the first of torchrun's alone, and its peers do not wait: so that is last.
    # Of xdist's workers one begins with the ranks; the others run all else meanwhile.
    first = int(os.environ.get("WORLD_SIZE", "1")) > 1 or "PYTEST_XDIST_WORKER" in os.environ
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # stable: all else keeps its order
    items.sort(key=lambda item: (_scope(item.nodeid) == "ranks") is not first)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have one xdist worker run all tests that start ranks: each is started once."""
    if config.getoption("dist") != "load":
        return None
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _scope  # what xdist documents a subclass for; it has no types to subclass
    config.option.loadscopereorder = False
    return scheduler


def _scope(nodeid: str) -> str:
    """Name what must stay on one worker."""
    alone = nodeid.startswith("tests/multigpu/alone/")
    on_ranks = nodeid.startswith(("tests/multigpu/", "tests/property/test_ranks.py"))
    return "ranks" if on_ranks and not alone else nodeid


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # Dynamo measures how long each compilation's guards take, and flushes the processor's caches for that: a
    # sixth of the time of these tests.
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture
def one_rank_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    from torch import distributed as dist  # torch takes seconds, and many runs need none of it

    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """No compiled code and no counter of another test, before and after."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
