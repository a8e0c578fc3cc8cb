"""Fixtures that several unit tests share."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist


@pytest.fixture(scope="session", autouse=True)
def unmeasured_and_untraced() -> Iterator[None]:
    """Dynamo does without what nobody reads here, and what costs a fifth of the whole run's time.

    It does not time its guards, for which it floods the caches first, and does not write each graph into the
    structured trace, for which pytest's log handler would be reason enough.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
        patch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
        yield


@pytest.fixture
def one_rank_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """No compiled code and no counter of another test, before and after."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
