"""Strategy inline with Inductor: what was compiled is found again, and memory is not used twice."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.inline import inductor

pytestmark = pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """What Inductor's caches and AOTAutograd's gave within the block."""
    counters.clear()
    found: dict[str, int] = {}
    yield found
    found["graphs compiled"] = counters["inductor"]["fxgraph_cache_miss"]
    found["traces found"] = counters["aot_autograd"]["autograd_cache_hit"]
    found["traces made"] = counters["aot_autograd"]["autograd_cache_miss"]
    found["not cached"] = counters["aot_autograd"]["autograd_cache_bypass"]


def train(*, plain: bool = False) -> list[Tensor]:
    """One step of a process that has compiled nothing yet, as far as Dynamo knows."""
    torch._dynamo.reset()
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=8 * 8 * 4 / 2**20)
    with torch._dynamo.config.patch(optimize_ddp=False):
        step = torch.compile(ddp) if plain else ddpopt.compile(ddp, strategy="inline")
        torch.autograd.backward(step(torch.ones(2, 8)).sum())
    return [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]


def test_a_second_start_compiles_nothing_again_and_is_never_given_the_plain_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fresh_cache():
        with counted() as cold:
            first = train()
        with counted() as other:
            whole = train(plain=True)
        with counted() as warm:
            second = train()
        monkeypatch.setattr(inductor, "_traced_code", lambda: "of another release")
        with counted() as changed:
            train()
    assert (cold["traces made"], cold["traces found"], cold["not cached"]) == (1, 0, 0)
    assert warm == {"graphs compiled": 0, "traces found": 1, "traces made": 0, "not cached": 0}
    assert changed["traces made"] == other["traces made"] == 1
    assert len(first) == 4
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, whole))


class Looked(nn.Module):
    """Rows of a table, read last: in the backward their gradient is made first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 8, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        out: Tensor = x * self.table(rows)
        return out


def test_a_sparse_gradient_is_handed_over_before_code_uses_its_memory_again() -> None:
    ddp = DistributedDataParallel(Looked(), bucket_cap_mb=8 * 8 * 4 / 2**20)
    eager = Looked()
    compiled = ddpopt.compile(ddp, strategy="inline")
    for step in range(2):  # the second one adds to what is there
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        rows = torch.tensor([0, 1, 1, step])
        for model in (compiled, eager):
            torch.autograd.backward(model(x, rows).sum())
    for parameter, expected in zip(ddp.parameters(), eager.parameters(), strict=True):
        assert parameter.grad is not None
        assert expected.grad is not None
        assert parameter.grad.layout == expected.grad.layout
        torch.testing.assert_close(parameter.grad.to_dense(), expected.grad.to_dense())


class SharedGradient(nn.Module):
    """Two biases whose gradients are one tensor that the backward computes; and a scale that goes first."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8, 8))
        self.scale = nn.Parameter(torch.ones(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat([x, x]) + self.left + self.right).tanh() @ self.scale


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("limit", [8 * 8 * 4, 8 * 16 * 4], ids=["apart", "together"])
@pytest.mark.parametrize("hooked", ["left", "right", "scale"])
def test_a_gradient_that_was_kept_shares_no_memory_with_one_that_was_handed_over(
    hooked: str, limit: int, backend: str
) -> None:
    model = SharedGradient()
    watched: Any = model.get_parameter(hooked)
    watched.register_hook(lambda _: None)
    ddp = DistributedDataParallel(model, bucket_cap_mb=limit / 2**20)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward(ddpopt.compile(ddp, backend=backend, strategy="inline")(x).sum())
    assert model.left.grad is not None
    assert model.right.grad is not None
    assert torch.equal(model.left.grad, model.right.grad)
    assert model.left.grad.data_ptr() != model.right.grad.data_ptr()


@pytest.mark.parametrize("as_view", [False, True], ids=["own memory", "views of buckets"])
def test_gradients_that_go_together_accumulate_and_are_reduced_as_eagers(as_view: bool) -> None:
    compiled_ddp, eager = (
        DistributedDataParallel(Net(), bucket_cap_mb=8 * 9 * 4 / 2**20, gradient_as_bucket_view=as_view)
        for _ in range(2)
    )
    compiled = ddpopt.compile(compiled_ddp, strategy="inline")
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for call, ddp in ((compiled, compiled_ddp), (eager, eager)):
            with ddp.no_sync() if step % 2 == 0 else nullcontext():
                torch.autograd.backward(call(x).sum())
        for parameter, expected in zip(compiled_ddp.parameters(), eager.parameters(), strict=True):
            assert parameter.grad is not None
            assert expected.grad is not None
            torch.testing.assert_close(parameter.grad, expected.grad)


class Weighted(nn.Module):
    """Multiplies its first weight by a tensor, which the backward reads after the last layer's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(8, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        h = x @ self.first
        for layer in self.layers:
            h = layer(h).tanh()
        return h.sum() + (self.first.sin() * weight).sum()


@pytest.mark.parametrize("read", ["gradient", "flat buffer", "view of a bucket"])
def test_compiled_code_that_reads_gradients_reads_those_of_before_the_backward(read: str) -> None:
    found: dict[str, list[Tensor]] = {}
    for engine in ("eager", "inline"):
        torch._dynamo.reset()
        as_view = read == "view of a bucket"
        ddp = DistributedDataParallel(Weighted(), bucket_cap_mb=0.0002, gradient_as_bucket_view=as_view)
        model = ddp if engine == "eager" else ddpopt.compile(ddp, strategy="inline")
        last = ddp.module.layers[2].weight
        flat = torch.zeros(2, 8, 8)
        if read == "flat buffer":
            last.grad = flat[0]
        weight = torch.ones(8, 8)
        left = found.setdefault(engine, [])
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            given = flat.select(0, 0) if read == "flat buffer" else weight
            torch.autograd.backward(model(x, given))
            left += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
            assert last.grad is not None
            weight = last.grad
            if as_view:
                ddp.zero_grad()
    torch.testing.assert_close(found["inline"], found["eager"])
