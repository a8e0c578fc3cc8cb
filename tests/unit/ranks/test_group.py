"""The process group of a test that runs on ranks."""

from typing import Any

import pytest
import torch.distributed as dist

from ddpopt.ranks.group import grouped

c10d: Any = dist  # torch does not mark its re-exports


def test_after_a_group_that_could_not_be_made_the_next_one_has_the_name_that_peers_give_it() -> None:
    alone_of_two = grouped(0.2, (c10d.HashStore(), 0, 2), backend="gloo")
    with pytest.raises(dist.DistStoreError), alone_of_two:
        pass
    with grouped(10.0, (c10d.HashStore(), 0, 1), backend="gloo"):
        world = c10d.group.WORLD
        assert world.group_name == "0"
