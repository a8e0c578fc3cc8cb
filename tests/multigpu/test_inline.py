"""Strategy inline on several ranks: eager DDP's gradients, in buckets that leave while backward runs."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_utils import DeterministicGuard

import ddpopt
from ddpopt.ddp import deferral
from ddpopt.ddp.impose import imposed_plan
from ddpopt.errors import UnsupportedError
from ddpopt.planning.plan import Strategy
from ddpopt.ranks.group import Ranks
from tests.support.models import Gradients, Tower, hand_overs, hook_that_sees
from tests.support.training import SETTINGS, STEPS, Buckets, Setting, alike, batch, build, loss, train
from tests.support.turns import in_turn

LAYER_MB = 4 * 6 * 7 / 2**20
LAYERS = [f"layers.{layer}.{name}" for layer in reversed(range(4)) for name in ("bias", "weight")]
ALL = ["scale", "optional.bias", "optional.weight", *LAYERS]
"""The trainable parameters of a Tower in the order in which their gradients complete."""


def penalised_somewhere_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    plain = loss(ddp(batch(ranks, step)))
    weight = ddp.module.get_parameter("layers.2.weight")
    return plain + weight.square().sum() if (step + ranks.rank) % 2 else plain


NOTHING_EARLY = {"static graph, one backward", "one backward"}
WHOLE = {"used while accumulating", "one bucket"}
"""A graph is compiled whole; in the first, that of rank 0 that comes second, before a plan is in force."""
RANKS_DIFFER = (
    "default", "static graph, unused on others", "static graph, one backward", "unused somewhere",
    "used while accumulating", "one backward",
)  # fmt: skip
"""Or nothing may be handed over; corpus cases, and options of verification, train the others on ranks."""
WAYS = {
    **{name: SETTINGS[name] for name in RANKS_DIFFER},
    "penalty somewhere": Setting(penalised_somewhere_step),
    "one bucket": Setting(arguments={"bucket_cap_mb": 25}),
}


def wrapped(setting: Setting, ranks: Ranks) -> DistributedDataParallel:
    arguments = {"bucket_cap_mb": LAYER_MB, **setting.arguments}
    return build(Setting(setting.step, arguments), ranks)


def inlined(ddp: DistributedDataParallel, **options: Any) -> Any:
    torch._dynamo.reset()
    return ddpopt.compile(ddp, backend="aot_eager", strategy="inline", **options)


def that_wait(name: str, ranks: Ranks, step: int) -> set[str]:
    """Parameters whose gradients must not be handed over in the last backward of a step."""
    if name in NOTHING_EARLY:
        return set(ALL)
    optional, weight = {"optional.weight", "optional.bias"}, {"layers.2.weight"}
    waiting: dict[str, set[str]] = {
        "static graph, unused on others": optional if ranks.rank else set(),
        "used while accumulating": optional,
        "unused somewhere": set() if (step + ranks.rank) % 3 == 0 else optional,
        "penalty somewhere": weight if (step + ranks.rank) % 2 else set(),
    }
    return waiting.get(name, set())


def train_watched(ddp: Any, setting: Setting, ranks: Ranks) -> tuple[list[Gradients], list[Buckets]]:
    """Train inline; and for each step what came one after the other in its last backward.

    A bucket that left is the sorted names of its parameters, a gradient that was handed over its name alone.
    """
    events: list[Buckets] = []
    ddp.register_comm_hook(None, hook_that_sees(ddp, lambda names: events[-1].append(("", *sorted(names)))))
    with hand_overs(ddp, lambda name: events[-1].append((name,)) if events else None):
        gradients = train(inlined(ddp), setting, ranks, events)
    # the next step's backwards under no_sync come after the last bucket
    return gradients, [noted[: len(noted) - [*map(is_bucket, noted)][::-1].index(True)] for noted in events]


def is_bucket(event: tuple[str, ...]) -> bool:
    return event[0] == ""


@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_eagers_and_handed_over_where_they_may(ranks: Ranks, name: str) -> None:
    setting = WAYS[name]
    expected = train(wrapped(setting, ranks), setting, ranks, [])
    ddp = wrapped(setting, ranks)
    gradients, events = train_watched(ddp, setting, ranks)
    plan = imposed_plan(ddp)
    assert alike(ranks, gradients, expected)
    assert plan is not None
    planned = [("", *sorted(bucket.params)) for bucket in plan.buckets]
    for step, noted in enumerate(events):
        assert [event for event in noted if is_bucket(event)] == planned
        handed = [event[0] for event in noted if not is_bucket(event)]
        allowed = set(ALL) - that_wait(name, ranks, step)
        assert set(handed) <= allowed
        assert len(handed) == (len(set(handed)) if name in WHOLE else len(allowed))


def test_buckets_leave_while_the_backward_still_runs(ranks: Ranks) -> None:
    _, events = train_watched(wrapped(Setting(), ranks), Setting(), ranks)
    layers: Buckets = []
    for bias, weight in zip(LAYERS[::2], LAYERS[1::2], strict=True):
        layers += [(bias,), (weight,), ("", bias, weight)]
    assert [noted[-len(layers) :] for noted in events] == [layers] * STEPS


def test_a_static_graph_launches_early_from_its_second_step_on(ranks: Ranks) -> None:
    setting = Setting(arguments={"static_graph": True})
    _, events = train_watched(wrapped(setting, ranks), setting, ranks)
    first = [noted.index(next(filter(is_bucket, noted))) for noted in events]
    assert first[0] == len(ALL)
    assert max(first[1:]) < len(ALL)


c10d: Any = dist  # torch does not mark its re-exports


class Summed(torch.autograd.Function):
    """The sum of all ranks' values; its gradient is the sum of their gradients."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Any:
        return all_reduce(x, "sum", c10d.group.WORLD)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Any:
        return all_reduce(grad, "sum", c10d.group.WORLD)


class Exchanging(Tower):
    """A tower on top of what the ranks sum: a collective runs between its buckets."""

    def forward(self, x: Tensor, use_optional: bool = True) -> Tensor:
        summed = Summed.apply(torch.tanh(self.frozen(x) * self.scale))  # type: ignore[no-untyped-call]  # of torch
        return super().forward(summed, use_optional)


@pytest.mark.parametrize(("model", "strategy"), in_turn([(Tower,), (Exchanging,)], ("inline", "split")))
def test_ranks_may_differ_in_what_waits_for_a_hook(ranks: Ranks, model: type[Tower], strategy: Any) -> None:
    runs, seen = [], [0, 0]
    for index in range(2):
        ddp = DistributedDataParallel(model().to(ranks.device), bucket_cap_mb=LAYER_MB)

        def count(gradient: Tensor, index: int = index) -> Tensor:
            seen[index] += 1
            return 2 * gradient

        if ranks.rank == 0:
            ddp.module.get_parameter("layers.1.weight").register_hook(count)
        torch._dynamo.reset()
        call: Any = ddpopt.compile(ddp, backend="aot_eager", strategy=strategy) if index else ddp
        runs.append(train(call, Setting(), ranks, []))
    assert alike(ranks, runs[1], runs[0])
    assert seen == ([STEPS, STEPS] if ranks.rank == 0 else [0, 0])


class Glued(Tower):
    """A tower whose layers are not compiled, so that no graph trains a parameter."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def uncompiled(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor, use_optional: bool = True) -> Any:
        return self.uncompiled(torch.tanh(x) * 2)


def test_a_graph_that_one_rank_alone_compiles_later_asks_the_others_for_nothing(ranks: Ranks) -> None:
    runs = []
    for index in range(2):
        ddp = DistributedDataParallel(Glued().to(ranks.device), bucket_cap_mb=LAYER_MB)
        call: Any = inlined(ddp, dynamic=False) if index else ddp
        for step in range(3):
            rows = batch(ranks, step)
            call(rows[:-1] if (step, ranks.rank) == (1, 1) else rows).square().mean().backward()
        runs.append([[parameter.grad for parameter in ddp.module.parameters()]])
    assert alike(ranks, runs[1], runs[0])
    assert imposed_plan(ddp) is None


def test_a_rank_compiled_alone_waits_and_then_trains_on_with_ddps_buckets(ranks: Ranks) -> None:
    modules = [wrapped(Setting(), ranks) for _ in range(2)]
    alone: Any = inlined(modules[1]) if ranks.rank == 0 else modules[1]
    with patch.object(deferral, "LONGEST_WAIT", timedelta(seconds=1)):
        expected, gradients = (train(call, Setting(), ranks, []) for call in (modules[0], alone))
    assert alike(ranks, gradients, expected)
    assert (imposed_plan(modules[1]) is None) == (ranks.size > 1)


def test_with_buckets_ddp_the_reducer_rebuilds_eagers_buckets(ranks: Ranks) -> None:
    modules = [wrapped(Setting(), ranks) for _ in range(2)]
    seen: list[list[Buckets]] = [[], []]
    for ddp, notes in zip(modules, seen, strict=True):
        ddp.register_comm_hook(None, hook_that_sees(ddp, lambda names, notes=notes: notes[-1].append(names)))  # type: ignore[misc]  # bound now
    before = modules[1].reducer
    expected = train(modules[0], Setting(), ranks, seen[0])
    gradients = train(inlined(modules[1], buckets="ddp"), Setting(), ranks, seen[1])
    assert alike(ranks, gradients, expected)
    assert seen[1] == seen[0]
    assert modules[1].reducer is before
    assert imposed_plan(modules[1]) is None


def autocast(is_on: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16, is_on)


def deterministic() -> Any:
    return DeterministicGuard(True)  # type: ignore[no-untyped-call]  # of torch


SURROUNDINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "autocast around both": (lambda: autocast(True), lambda: autocast(True)),
    "autocast around the forward": (lambda: autocast(True), lambda: autocast(False)),
    "autocast around the backward": (lambda: autocast(False), lambda: autocast(True)),
    "a default device": (lambda: torch.device("cpu"), lambda: torch.device("meta")),
    "deterministic algorithms": (deterministic, deterministic),
}
"""What is around a forward, and around its backward."""


def state_of_torch() -> tuple[Any, ...]:
    """What a hook may look at; the dtype of a product shows whether autocast really is on."""
    product = torch.ones(1, 1, device="cpu") @ torch.ones(1, 1, device="cpu")
    return (
        product.dtype,
        torch.empty(1).device.type,
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def note_state(states: list[tuple[Any, ...]], _: object) -> None:
    states.append(state_of_torch())


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_communication_hook_sees_the_state_that_it_sees_in_eager(ranks: Ranks, name: str) -> None:
    around_forward, around_backward = SURROUNDINGS[name]
    seen: dict[bool, list[tuple[Any, ...]]] = {}
    for compiles in (False, True):
        ddp = wrapped(Setting(), ranks)
        seen[compiles] = []
        note = partial(note_state, seen[compiles])
        ddp.register_comm_hook(None, hook_that_sees(ddp, note))
        call = inlined(ddp) if compiles else ddp
        for step in range(STEPS):
            x = batch(ranks, step)
            with around_forward():
                total = loss(call(x))
            with around_backward():
                torch.autograd.backward(total)
    assert set(seen[True]) == set(seen[False])
    assert len(set(seen[True])) == 1


def test_compiled_autograd_is_refused_before_anything_is_sent(ranks: Ranks) -> None:
    call = inlined(wrapped(Setting(), ranks))
    total = loss(call(batch(ranks, 0)))
    capture = compiled_autograd._enable(torch.compile(backend="eager"))
    with capture, pytest.raises(UnsupportedError, match="compiled autograd captures this backward"):
        torch.autograd.backward(total)


def boxed(gm: Any, _: Any) -> Any:
    return make_boxed_func(gm.forward)


AOT_OPTIONS: dict[str, dict[str, Any]] = {
    "nothing compiles": {"fw_compiler": nop},
    "only backward compiles": {"fw_compiler": nop, "bw_compiler": boxed},
    "only inference compiles": {"fw_compiler": nop, "inference_compiler": boxed},
    "partition": {"fw_compiler": boxed, "partition_fn": min_cut_rematerialization_partition},
    "decompositions": {"fw_compiler": boxed, "decompositions": select_decomp_table()},
    "mutations": {"fw_compiler": boxed, "keep_inference_input_mutations": True},
}


@pytest.mark.parametrize("strategy", ["inline", "split"])
def test_every_option_of_aot_autograd_gives_eagers_gradients(ranks: Ranks, strategy: Strategy) -> None:
    for name, options in AOT_OPTIONS.items():
        torch._dynamo.reset()
        eager, ddp = (wrapped(SETTINGS["default"], ranks) for _ in range(2))
        backend: Any = aot_autograd(**options)
        model = ddpopt.compile(ddp, backend=backend, strategy=strategy)
        found = train(model, SETTINGS["default"], ranks, [])
        torch.testing.assert_close(found, train(eager, SETTINGS["default"], ranks, []), msg=name)
        assert imposed_plan(ddp) is not None
