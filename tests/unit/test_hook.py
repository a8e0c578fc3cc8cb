"""The one hook in Dynamo: it is asked at the right moment, changes only what it must, and goes away again."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch._dynamo import convert_frame
from torch._dynamo.backends.distributed import DDPOptimizer

import ddpopt.backend
from ddpopt import hook

MIB = 2**20


def backend(*_: Any) -> Callable[..., Any]:
    raise AssertionError("nothing is compiled here")


def other(*_: Any) -> Callable[..., Any]:
    raise AssertionError("nothing is compiled here")


def built(compiler: Any) -> Any:
    """What Dynamo gets where it would build torch's optimizer around a backend."""
    return DDPOptimizer(bucket_bytes_cap=MIB, backend_compile_fn=compiler)


def test_a_backend_that_is_not_chosen_gets_torchs_optimizer() -> None:
    with hook.replacing(lambda _: None):
        optimizer = built(backend)
    assert type(optimizer) is DDPOptimizer
    assert (optimizer.bucket_bytes_cap, optimizer.backend_compile_fn) == (MIB, backend)


def test_what_is_chosen_compiles_in_place_of_torchs_optimizer() -> None:
    with hook.replacing(lambda _: other):
        optimizer = built(backend)
    assert not isinstance(optimizer, DDPOptimizer)
    assert optimizer.compile_fn is other


def test_the_chooser_is_asked_about_the_backend_that_is_compiling() -> None:
    asked: list[Any] = []
    with hook.replacing(asked.append):
        built(backend)
        DDPOptimizer(MIB, other)
    assert asked == [backend, other]


def test_what_is_chosen_skips_the_checks_of_torchs_optimizer() -> None:
    # torch's own asserts that the first bucket is the smaller one, and so fails for caps below 1 MiB
    arguments: dict[str, Any] = {
        "bucket_bytes_cap": 1,
        "backend_compile_fn": backend,
        "first_bucket_cap": MIB,
    }
    with pytest.raises(AssertionError):
        DDPOptimizer(**arguments)
    with hook.replacing(lambda _: other):
        assert DDPOptimizer(**arguments).compile_fn is other


def test_the_hook_is_gone_behind_the_block() -> None:
    before = DDPOptimizer.__dict__.get("__new__")
    with hook.replacing(lambda _: other):
        assert DDPOptimizer.__dict__.get("__new__") is not before
    assert DDPOptimizer.__dict__.get("__new__") is before


def test_the_hook_is_gone_behind_a_block_that_raises() -> None:
    before = DDPOptimizer.__dict__.get("__new__")
    with pytest.raises(ZeroDivisionError), hook.replacing(lambda _: other):
        _ = 1 / 0
    assert DDPOptimizer.__dict__.get("__new__") is before


def test_blocks_may_be_nested() -> None:
    with hook.replacing(lambda _: other):
        with hook.replacing(lambda _: None):
            assert type(built(backend)) is DDPOptimizer
        assert built(backend).compile_fn is other


class Optimizer:
    """A class like torch's, that nothing was installed on yet."""

    def __init__(self, bucket_bytes_cap: int, backend_compile_fn: Any) -> None:
        self.backend_compile_fn = backend_compile_fn


def test_where_nothing_was_installed_torchs_optimizer_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "DDPOptimizer", Optimizer)
    with hook.replacing(lambda _: other):
        assert Optimizer(MIB, backend).compile_fn is other  # type: ignore[attr-defined]  # what was chosen
    assert Optimizer(MIB, backend).backend_compile_fn is backend


def test_importing_ddpopt_leaves_other_backends_to_torchs_optimizer() -> None:
    assert type(built(backend)) is DDPOptimizer
    assert type(built("inductor")) is DDPOptimizer


def test_ddpopts_own_backend_is_never_split_by_torch() -> None:
    own = ddpopt.backend.DdpoptBackend("eager")
    assert built(own).compile_fn is own


def test_dynamo_still_builds_the_class_that_is_hooked() -> None:
    # private, torch 2.11 to 2.13: if this fails, so does ddpopt.hook
    source = inspect.getsource(convert_frame)
    assert "DDPOptimizer(" in source
    assert "backend_compile_fn=" in source
    assert ".compile_fn" in source
