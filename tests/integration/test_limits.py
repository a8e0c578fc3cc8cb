"""docs/limits.md: each row of its table is shown by a test, and what is compiled whole trains as in eager."""

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.errors import UnsupportedError
from ddpopt.graph.artifacts import say_once
from ddpopt.judge.engines.engine import skip_frames_of_ddp
from ddpopt.ranks.group import Ranks

ROOT = Path(__file__).parents[2]
HERE = "integration/test_limits.py::test_what_ddpopt_leaves_alone_trains_as_in_eager_and_the_reason_is_logged"
SHOWN = {
    "FSDP, or another engine": HERE,
    "compiled autograd around": "multigpu/test_inline.py"
    "::test_compiled_autograd_is_refused_before_anything_is_sent",
    "distributed autograd": "integration/test_fresh_interpreters.py"
    "::test_distributed_autograd_gets_its_gradients_from_split_and_is_refused_by_inline",
    "DDP with tensor parallelism": "multigpu/test_tensor_parallel.py"
    "::test_a_module_whose_parameters_torch_has_replaced_is_refused",
    "DDP's `mixed_precision`": "multigpu/test_accelerator.py::test_a_step_does_what_eager_does",
    "DDP's `delay_all_reduce": "integration/test_limits.py"
    "::test_delayed_all_reduces_are_refused_before_anything_is_compiled",
    '`torch._dynamo.config.optimize_ddp = "python_reducer"`': HERE,
    "two DDP modules that share": "unit/dynamo/test_backend.py"
    "::test_where_two_ddp_modules_reduce_one_gradient_the_outer_one_has_the_last_word",
    "`torch.func.functional_call`": HERE,
    "a model that is called as `model.module`": HERE,
    "a communication hook that modifies": "unit/dynamo/test_backend.py"
    "::test_what_a_communication_hook_steps_is_read_as_it_was_before",
    "CUDA graphs": "unit/dynamo/test_backend.py::test_options_reach_the_backend_each_time_it_is_called",
    "`ddpopt.compile(…, fullgraph=True)`": "unit/dynamo/test_backend.py"
    "::test_fullgraph_is_about_the_module_inside",
}
"""By the beginning of each row, the test that shows it."""


def rows() -> list[str]:
    page = (ROOT / "docs/limits.md").read_text(encoding="utf-8").partition("## Training")[2]
    table = page.partition("*Compiled whole*")[0]
    return [line[2:] for line in table.splitlines() if line.startswith("| ")][1:]


def test_each_row_has_a_test_that_exists() -> None:
    for row in rows():
        shown = [test for begin, test in SHOWN.items() if row.startswith(begin)]
        assert len(shown) == 1, row
        file, _, name = shown[0].partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), name
    assert len(SHOWN) == len(rows())


class Net(nn.Module):
    """Of a class of its own, as Dynamo skips those of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.first(x)))


def plain(model: nn.Module) -> Any:
    return model


def by_python(model: nn.Module) -> Any:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return DistributedDataParallel(model)


def called_inside(model: Any) -> Any:
    return lambda x: model.module(x)


def functional(ddp: Any) -> Any:
    names = [name for name, _ in ddp.named_parameters()]
    return lambda x: torch.func.functional_call(ddp, {name: ddp.get_parameter(name) * 1 for name in names}, x)


ALONE: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Any]]] = {
    "fully_shard": (lambda model: fully_shard(model), plain),
    "model.module": (DistributedDataParallel, called_inside),
    "functional_call": (DistributedDataParallel, functional),
    "python_reducer": (by_python, plain),
}


@pytest.fixture
def ddp_as_before() -> Iterator[None]:
    """After the test, Dynamo skips DDP's frames, whatever the test made of that."""
    yield
    torch._dynamo.reset()
    skip_frames_of_ddp()


@pytest.mark.usefixtures("ddp_as_before")
@pytest.mark.parametrize("way", ALONE)
def test_what_ddpopt_leaves_alone_trains_as_in_eager_and_the_reason_is_logged(
    way: str, one_rank_group: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ddpopt")
    say_once.cache_clear()
    wrap, calling = ALONE[way]
    found: list[list[Tensor]] = []
    for backend in ("eager", "ddpopt"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = wrap(Net())
        call = calling(model) if backend == "eager" else torch.compile(calling(model), backend=backend)
        for step in range(2):
            call(torch.full((3, 6), step + 1.0)).square().sum().backward()
        gradients: list[Any] = [each.grad for each in model.parameters()]
        found.append([getattr(each, "full_tensor", lambda each=each: each)() for each in gradients])
    torch.testing.assert_close(*found)
    assert "whole" in caplog.text


@pytest.mark.parametrize("through", ["ddpopt.compile", "torch.compile"])
def test_delayed_all_reduces_are_refused_before_anything_is_compiled(through: str, alone: Ranks) -> None:
    model = Net()
    delayed = [("first.weight", model.first.weight)]
    ddp = DistributedDataParallel(
        model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model.last.weight
    )
    told = "delay_all_reduce_named_params: DDP sends these gradients when that of param_to_hook_all_reduce"
    if through == "ddpopt.compile":
        with pytest.raises(UnsupportedError, match=told):
            ddpopt.compile(ddp, backend="eager")
    else:
        with pytest.raises(BackendCompilerFailed, match=told):
            torch.compile(ddp, backend="ddpopt-eager")(torch.ones(2, 6))
