"""Setup shared by every test run of this repository: Hypothesis, inline snapshots, the order under xdist."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.profiles import load_profiles

# HYPOTHESIS_PROFILE, or pytest's --hypothesis-profile: dev, ci or nightly. CI=true gives ci.
load_profiles()

# Otherwise each process that compiles C++ first probes the processor's vector instructions: seconds for each
# kind, in processes that import torch.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly",
        action="store_true",
        help="run the tests marked nightly too: each takes long, and has a shorter kin",
    )
    parser.getgroup("expecttest").addoption(
        "--accept",
        action="store_true",
        help="write the snapshots that differ into the test files, in one process; as EXPECTTEST_ACCEPT=1",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "nightly: runs with --nightly only, for a shorter test of the same thing runs always"
    )
    config.addinivalue_line("markers", "long: begins before others, so that no worker ends alone with it")
    if config.getoption("--accept"):
        os.environ["EXPECTTEST_ACCEPT"] = "1"  # expecttest offers no other way
    if os.environ.get("EXPECTTEST_ACCEPT"):
        # Each process would rewrite the test files by line number, and undo the others' edits.
        config.option.tx = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--nightly"):
        later = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]
    # Under torchrun, tests without ranks run only on rank 0 while its peers do not wait, so they come last.
    # Under xdist, one worker begins with the tests on ranks; the others run the rest meanwhile.
    first = int(os.environ.get("WORLD_SIZE", "1")) > 1 or "PYTEST_XDIST_WORKER" in os.environ
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # stable: others keep their order
    items.sort(key=lambda item: (_scope(item.nodeid) == "ranks") is not first)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one xdist worker run all tests that start ranks, so that each pool is started once."""
    if config.getoption("dist") != "load":
        return None
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _scope  # xdist documents a subclass for this, but has no types to subclass
    config.option.loadscopereorder = False
    return scheduler


def _scope(nodeid: str) -> str:
    """Name the group of tests that must stay on one worker."""
    alone = nodeid.startswith("tests/multigpu/alone/")
    on_ranks = nodeid.startswith(("tests/multigpu/", "tests/property/test_ranks.py"))
    return "ranks" if on_ranks and not alone else nodeid


@pytest.fixture
def one_rank_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    from torch import distributed as dist  # importing torch takes seconds, and many runs do not need it

    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Remove compiled code and counters of other tests, before and after."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
