"""ddpopt.ddp.state: one record for each DDP module, which lives as long and is in no copy of it."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

import ddpopt
from ddpopt.ddp.held import planned_reducer
from ddpopt.ddp.impose import impose
from ddpopt.ddp.state import ModuleState, state_of
from tests.support.models import arbitrary_plan, step, towers

pytestmark = pytest.mark.usefixtures("one_rank_group")


def trained(**arguments: Any) -> Any:
    """A module that was compiled and trained, so that its record has something in each field it can have."""
    torch._dynamo.reset()
    ddp = towers(**arguments)
    step(ddpopt.compile(ddp, backend="eager"))
    return ddp


def test_a_module_has_one_record_and_others_have_their_own() -> None:
    first, second = towers(), towers()
    assert state_of(first) is state_of(first)
    assert state_of(first) is not state_of(second)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))])
def test_a_copy_begins_with_an_empty_record(copied: Any) -> None:
    ddp = trained()
    assert planned_reducer(ddp) is not None
    assert len(state_of(ddp).graphs) == 1
    of_copy, empty = state_of(copied(ddp)), ModuleState()
    assert len(of_copy.graphs) == len(of_copy.backends) == 0
    changed = {name for name, value in vars(of_copy).items() if value != getattr(empty, name)}
    assert changed <= {"graphs", "backends"}  # two empty collections are not equal


def test_a_record_dies_with_its_module_and_does_not_keep_it_alive() -> None:
    ddp = trained()
    kept = weakref.ref(ddp), weakref.ref(state_of(ddp))
    del ddp
    torch._dynamo.reset()
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_a_reducer_that_ddp_has_replaced_no_longer_counts() -> None:
    ddp = towers()
    impose(ddp, arbitrary_plan(ddp, 1))
    assert planned_reducer(ddp) is ddp.reducer
    ddp.reducer = towers().reducer
    assert planned_reducer(ddp) is None
