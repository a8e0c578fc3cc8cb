"""The one hook in Dynamo: it is asked at the right moment, changes only what it must, and goes away again."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends import distributed
from torch._dynamo.backends.distributed import DDPOptimizer

import ddpopt
import ddpopt.dynamo.backend
from ddpopt.dynamo import hook

MIB = 2**20


def backend(*_: Any) -> Callable[..., Any]:
    raise AssertionError("nothing is compiled here")


def other(*_: Any) -> Callable[..., Any]:
    raise AssertionError("nothing is compiled here")


def built(compiler: Any) -> Any:
    """What Dynamo gets where it would build torch's optimizer around a backend."""
    return distributed.DDPOptimizer(bucket_bytes_cap=MIB, backend_compile_fn=compiler)


def globals_of_torch() -> tuple[dict[str, Any], dict[str, Any]]:
    torch._dynamo.reset()
    gc.collect()  # a backend of an earlier test holds its hook for as long as it lives
    return dict(vars(distributed)), dict(vars(DDPOptimizer))


def test_the_hook_is_removed_after_a_block_that_raises() -> None:
    before = globals_of_torch()
    with pytest.raises(ZeroDivisionError), hook.replacing(lambda _: other):
        _ = 1 / 0
    assert globals_of_torch() == before


def test_of_nested_blocks_the_inner_one_is_asked_first() -> None:
    with hook.replacing(lambda _: other), hook.replacing(lambda c: c if c is backend else None):
        assert built(backend).compile_fn is backend
        assert built(other).compile_fn is other


def test_choosers_may_leave_in_any_order() -> None:
    before = globals_of_torch()
    first, second = hook.add_chooser(lambda _: other), hook.add_chooser(lambda _: None)
    first()
    assert type(built(backend)) is DDPOptimizer
    second()
    assert globals_of_torch() == before


def test_ddpopts_own_backends_are_never_split_by_torch_and_others_are_left_to_it() -> None:
    own = ddpopt.dynamo.backend.DdpoptBackend("eager")
    assert built(own).compile_fn is own
    assert type(built(backend)) is DDPOptimizer
    assert type(built("inductor")) is DDPOptimizer
    with ddpopt.replacing_ddp_optimizer():
        assert built(own).compile_fn is own
        assert built(backend).compile_fn.compiler is backend
