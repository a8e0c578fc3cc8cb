"""ddpopt.observe: what is seen, and that seeing changes nothing."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpopt.ddp.impose import impose
from ddpopt.ddp.specs import specs_from_ddp
from ddpopt.errors import UsageError
from ddpopt.observation.observe import Observation, observe
from ddpopt.observation.reducer_buckets import running_buckets
from ddpopt.planning.plan import Plan
from ddpopt.testing.drawn import DrawnModel, step
from ddpopt.tuning.observed import record
from tests.support.models import arbitrary_plan, changing, plan_of
from tests.support.tracing import Recorder

c10d: Any = dist  # torch does not mark its re-exports


pytestmark = pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")


class Pair(nn.Module):
    """Two layers; one bucket each under a cap of 100 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.relu(self.first(x)))


def pair(**arguments: Any) -> Any:
    return DistributedDataParallel(Pair(), bucket_cap_mb=100 / 2**20, **arguments)


def train(ddp: Any) -> None:
    torch.autograd.backward(ddp(torch.ones(2, 6)).sum())


def shown(seen: Observation) -> str:
    """Everything that was seen, as text."""
    lines = []
    for number, iteration in enumerate(seen.iterations):
        lines.append(f"iteration {number}, not sent: {iteration.unmatched}")
        lines += [f"  bucket {b.index}: {' '.join(b.params)}, {b.nbytes} bytes" for b in iteration.buckets]
    lines += [f"{c.op} of {c.nbytes} bytes of {c.dtype}: bucket {c.bucket}" for c in seen.collectives]
    return "\n".join(lines)


def facts(buckets: Iterable[Any]) -> list[tuple[Any, ...]]:
    return [(b.index, b.params, b.nbytes, b.dtype, b.device) for b in buckets]


def steps_seen(ddp: Any, steps: int) -> Observation:
    """What is observed of steps."""
    with observe(ddp) as seen:
        for _ in range(steps):
            train(ddp)
    return seen


def assert_every_step_has_the_buckets(seen: Observation, plan: Plan, steps: int) -> None:
    assert [facts(iteration.buckets) for iteration in seen.iterations] == [facts(plan.buckets)] * steps
    assert [iteration.unmatched for iteration in seen.iterations] == [()] * steps


def test_plain_ddp_is_seen_to_rebuild_its_buckets() -> None:
    expecttest.assert_expected_inline(
        shown(steps_seen(pair(), 2)),
        """\
iteration 0, not sent: ()
  bucket 0: first.weight first.bias second.weight second.bias, 336 bytes
iteration 1, not sent: ()
  bucket 0: second.bias second.weight, 168 bytes
  bucket 1: first.bias first.weight, 168 bytes
broadcast of 12 bytes of float32: bucket None
allreduce of 336 bytes of float32: bucket 0
broadcast of 20 bytes of int32: bucket None
broadcast of 8 bytes of int32: bucket None
broadcast of 12 bytes of float32: bucket None
allreduce of 168 bytes of float32: bucket 0
allreduce of 168 bytes of float32: bucket 1""",
    )


def test_a_plan_imposed_inside_the_block_is_seen_from_then_on_and_no_sync_launches_nothing() -> None:
    ddp = pair()
    plan = arbitrary_plan(ddp, 1)
    with observe(ddp) as seen:
        with ddp.no_sync():
            train(ddp)
        assert (seen.iterations, seen.buckets) == ((), ())
        train(ddp)
        impose(ddp, plan)
        train(ddp)
    assert [len(iteration.buckets) for iteration in seen.iterations] == [1, len(plan.buckets)]
    assert facts(seen.iterations[1].buckets) == facts(plan.buckets)
    assert [iteration.unmatched for iteration in seen.iterations] == [(), ()]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_inside_a_backward_is_part_of_it(reentrant: bool) -> None:
    class Checkpointed(Pair):
        def forward(self, x: Tensor) -> Any:
            hidden = torch.relu(self.first(x))
            return checkpoint(self.second, hidden, use_reentrant=reentrant)

    ddp: Any = DistributedDataParallel(Checkpointed())
    plan = plan_of([[spec] for spec in reversed(specs_from_ddp(ddp))])
    impose(ddp, plan)
    assert_every_step_has_the_buckets(steps_seen(ddp, 2), plan, 2)


def test_every_kind_of_collective_is_noted_once_with_what_it_sends_and_waiting_is_not() -> None:
    other: Any = dist.new_group([0])
    with observe(pair()) as seen:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(2, dtype=torch.float64), 0)
        dist.all_gather([torch.zeros(4, dtype=torch.int32)], torch.ones(4, dtype=torch.int32))
        dist.barrier()
        assert functional.all_reduce(torch.ones(3), "sum", other).sum() == 3
        dist.all_reduce(torch.ones(4), group=other)
    assert [(c.op, c.nbytes, c.dtype) for c in seen.collectives] == [
        ("allreduce", 12, "float32"),
        ("broadcast", 16, "float64"),
        ("allgather", 16, "int32"),
        ("barrier", 0, ""),
    ]
    assert [(c.op, c.nbytes) for c in seen.elsewhere] == [("all_reduce", 12), ("allreduce", 16)]


def test_a_complex_bucket_is_recognized_although_it_is_sent_as_pairs_of_real_numbers() -> None:
    program = DrawnModel((step("complex_gain"), step("linear"))).program
    ddp: Any = DistributedDataParallel(program.model())
    with observe(ddp) as seen:
        torch.autograd.backward(program.loss(ddp(*program.inputs()[0])))
    (iteration,) = seen.iterations
    assert {bucket.dtype for bucket in iteration.buckets} == {"complex64", "float32"}
    assert iteration.unmatched == ()


def test_a_hook_that_sends_another_type_is_matched_by_size_and_one_that_sends_another_size_marked() -> None:
    ddp = pair()
    ddp._register_builtin_comm_hook(c10d.BuiltinCommHookType.FP16_COMPRESS)
    sent = [(c.dtype, c.bucket) for c in steps_seen(ddp, 1).collectives if c.op == "allreduce"]
    assert sent == [("float16", 0)]

    def part(buffer: Tensor) -> Tensor:
        dist.all_reduce(buffer[:5].clone())
        return buffer

    ddp = pair()
    ddp.register_comm_hook(None, changing(part))
    (iteration,) = steps_seen(ddp, 1).iterations
    assert iteration.unmatched == (0,)
    assert [c.bucket for c in iteration.collectives] == [None]


def test_compilation_is_seen_and_happens_as_without_observing() -> None:
    ddp: Any = DistributedDataParallel(Pair())
    compiled: Any = torch.compile(ddp, backend=(recorder := Recorder()))
    with observe(compiled) as first:
        train(compiled)
        train(compiled)
    with observe(ddp) as second:
        train(compiled)
    assert (recorder.calls, len(first.graphs), len(second.graphs)) == (1, 1, 0)
    assert len(second.iterations) == 1


def test_higher_order_operators_run_inside_the_block() -> None:
    ones = torch.ones(2)
    with observe(pair()):
        chosen = torch.cond(torch.tensor(True), lambda x: x * 2, lambda x: x / 2, (ones,))
    assert torch.equal(chosen, ones * 2)


def state(ddp: Any) -> list[object]:
    """Modes and callbacks of torch, attributes and hooks of the module."""
    handler = torch._dynamo.callback.callback_handler
    torchs = [torch._C._len_torch_dispatch_stack(), len(handler.start_callbacks), len(handler.end_callbacks)]
    hooks = [len(v) for name, v in sorted(ddp.__dict__.items()) if name.endswith("hooks")]
    return [torchs, hooks, sorted(ddp.__dict__), ddp.reducer, ddp.logger]


@pytest.mark.parametrize("moment", ["forward", "backward", "never"])
def test_everything_is_as_before_after_the_block(moment: str) -> None:
    ddp = pair()
    train(ddp)
    before = state(ddp)

    if moment == "forward":
        ddp.module.register_forward_hook(lambda *_: 1 / 0)
    if moment == "backward":
        ddp.module.second.weight.register_hook(lambda _: 1 / 0)
    with contextlib.suppress(ZeroDivisionError), observe(ddp) as seen:
        train(ddp)
    assert state(ddp) == before
    assert isinstance(seen.collectives, tuple)


def test_what_happens_after_the_block_is_not_recorded_and_an_observation_is_used_once() -> None:
    ddp = pair()
    seen = steps_seen(ddp, 1)
    before = shown(seen)
    train(ddp)
    assert shown(seen) == before
    with pytest.raises(UsageError, match="already used"), seen:
        pass


def test_groups_may_be_destroyed_inside_the_block(tmp_path: Path) -> None:
    ddps = pair(process_group=dist.new_group([0], group_desc="mine")), pair()
    with observe(ddps[0]) as first, observe(ddps[1]) as second:
        for ddp in ddps:
            train(ddp)
            impose(ddp, plan_of([specs_from_ddp(ddp)]))
        dist.destroy_process_group()
    each = first.buckets, second.buckets, *map(running_buckets, ddps)
    dist.init_process_group("gloo", init_method=(tmp_path / "again").as_uri(), rank=0, world_size=1)
    assert [buckets[0].group for buckets in each] == ["mine (ranks 0)", "", "mine (destroyed)", ""]


def test_a_recorded_step_has_the_reducers_buckets_in_the_order_of_time() -> None:
    ddp = pair()
    optimizer = torch.optim.SGD(ddp.parameters())

    def iterate() -> None:
        train(ddp)
        optimizer.step()

    for _ in range(3):  # until the buckets are rebuilt
        seen = record(iterate, running_buckets(ddp))
    buckets = [(b.index, b.nbytes, b.params) for b in running_buckets(ddp)]
    assert [(b.index, b.nbytes, b.params) for b in seen.buckets] == buckets
    at = [(seen.forward_s, b.ready_s, b.sent_s, b.back_s, seen.reduced_s) for b in seen.buckets]
    assert len(at) > 1
    assert all(list(each) == sorted(each) for each in [*at, *zip(*at, strict=True)])
    assert 0 < seen.forward_s < seen.backward_s < seen.reduced_s < seen.step_s


def test_an_observation_prints_as_tables() -> None:
    ddp = pair()
    with observe(ddp) as seen:
        assert str(seen) == "No backward was synchronized."
        train(ddp)
        train(ddp)
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
    expecttest.TestCase().assertExpectedInline(
        str(seen),
        """\
2 backwards were synchronized; the buckets of the last:
bucket  sent as    MiB  dtype    gradients
-----------------------------------------------------------
     0        1  0.000  float32  second.bias, second.weight
     1        2  0.000  float32  first.bias, first.weight

other collectives, in the order in which they were first sent
collective               times  bytes  dtype    group
-----------------------------------------------------
broadcast (from rank 0)      2     12  float32
broadcast (from rank 0)      1     20  int32
broadcast (from rank 0)      1      8  int32
allreduce (max)              1     12  float32""",
    )
