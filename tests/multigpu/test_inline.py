"""Strategy inline on several ranks: eager DDP's gradients, in buckets that leave while backward runs."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.ddp.impose import imposed_plan
from ddpopt.ranks.group import Ranks
from tests.multigpu.models import Gradients, Tower, gradients_of, hand_overs, hook_that_sees, same
from tests.multigpu.training import (
    SETTINGS,
    STEPS,
    UNUSED,
    Buckets,
    Setting,
    Step,
    alike,
    backward,
    batch,
    build,
    loss,
    train,
    unused_everywhere_step,
    unused_somewhere_step,
    used_while_accumulating_step,
)

LAYER_MB = 4 * 6 * 7 / 2**20
LAYERS = [f"layers.{layer}.{name}" for layer in reversed(range(4)) for name in ("bias", "weight")]
ALL = ["scale", "optional.bias", "optional.weight", *LAYERS]
"""The trainable parameters of a Tower in the order in which their gradients complete."""


def penalised_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    weight = ddp.module.get_parameter("layers.2.weight")
    penalised: Tensor = loss(ddp(batch(ranks, step))) + weight.square().sum()
    return penalised


def penalised_somewhere_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    plain = loss(ddp(batch(ranks, step)))
    weight = ddp.module.get_parameter("layers.2.weight")
    return plain + weight.square().sum() if (step + ranks.rank) % 2 else plain


def two_forwards_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    return loss(ddp(batch(ranks, step))) + loss(ddp(batch(ranks, step, part=1)))


def evaluating_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    ddp.module.eval()
    with torch.no_grad():
        ddp(batch(ranks, step, part=1))
    ddp.module.train()
    return loss(ddp(batch(ranks, step)))


def autocast_step(ddp: DistributedDataParallel, step: int, ranks: Ranks) -> Tensor:
    with torch.autocast(ranks.device.type, dtype=torch.bfloat16):
        output = ddp(batch(ranks, step))
    return loss(output.float())


NOTHING_EARLY = {"static graph, one backward", "one backward", "one backward, unused", "two forwards"}
WHOLE = {"used while accumulating", "one bucket"}
"""A graph is compiled whole; in the first, that of rank 0 that comes second, before a plan is in force."""
WAYS = {
    **SETTINGS,
    "penalty": Setting(penalised_step),
    "penalty, bucket view": Setting(penalised_step, {"gradient_as_bucket_view": True}, keeps_gradients=True),
    "penalty somewhere": Setting(penalised_somewhere_step),
    "penalty somewhere, unused": Setting(penalised_somewhere_step, UNUSED),
    "two forwards": Setting(two_forwards_step),
    "evaluation between": Setting(evaluating_step),
    "autocast": Setting(autocast_step),
    "one bucket": Setting(arguments={"bucket_cap_mb": 25}),
}


def wrapped(setting: Setting, ranks: Ranks) -> DistributedDataParallel:
    arguments = {"bucket_cap_mb": LAYER_MB, **setting.arguments}
    return build(Setting(setting.step, arguments, setting.mixed), ranks)


def inlined(ddp: DistributedDataParallel, **options: Any) -> Any:
    torch._dynamo.reset()
    return ddpopt.compile(ddp, backend="aot_eager", strategy="inline", **options)


def that_wait(name: str, ranks: Ranks, step: int) -> set[str]:
    """Parameters whose gradients must not be handed over in the last backward of a step."""
    if name in NOTHING_EARLY:
        return set(ALL)
    optional, weight = {"optional.weight", "optional.bias"}, {"layers.2.weight"}
    waiting: dict[Step, set[str]] = {
        unused_everywhere_step: optional,
        used_while_accumulating_step: optional,
        unused_somewhere_step: set() if (step + ranks.rank) % 3 == 0 else optional,
        penalised_step: weight,
        penalised_somewhere_step: weight if (step + ranks.rank) % 2 else set(),
    }
    return waiting.get(WAYS[name].step, set())


def train_watched(
    ddp: DistributedDataParallel, setting: Setting, ranks: Ranks
) -> tuple[list[Gradients], list[Buckets]]:
    """Train inline; and for each step what came one after the other in its last backward.

    A bucket that left is the sorted names of its parameters, a gradient that was handed over its name alone.
    """
    events: list[Buckets] = []
    ddp.register_comm_hook(None, hook_that_sees(ddp, lambda names: events[-1].append(("", *sorted(names)))))
    with hand_overs(ddp, lambda name: events[-1].append((name,)) if events else None):
        gradients = train(inlined(ddp), setting, ranks, events)
    # the next step's backwards under no_sync come behind the last bucket
    return gradients, [noted[: len(noted) - [*map(is_bucket, noted)][::-1].index(True)] for noted in events]


def is_bucket(event: tuple[str, ...]) -> bool:
    return event[0] == ""


# DDP says that a static graph needs no find_unused_parameters; people pass both all the same.
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning")
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
    layers = [("", f"layers.{layer}.bias", f"layers.{layer}.weight") for layer in reversed(range(4))]
    assert len(events) == STEPS
    for noted in events:
        buckets = [event for event in noted if is_bucket(event)]
        assert buckets[-4:] == layers
        behind = {bucket: noted[noted.index(bucket) + 1 :] for bucket in layers}
        # when a layer's bucket has left, the gradients of all layers in front of it are still to come
        for layer, bucket in enumerate(layers):
            assert [event for event in behind[bucket] if not is_bucket(event)] == [
                (name,) for name in LAYERS[2 * (layer + 1) :]
            ]


def test_a_static_graph_launches_early_from_its_second_step_on(ranks: Ranks) -> None:
    setting = Setting(arguments={"static_graph": True})
    _, events = train_watched(wrapped(setting, ranks), setting, ranks)
    first = [noted.index(next(filter(is_bucket, noted))) for noted in events]
    assert first[0] == len(ALL)
    assert max(first[1:]) < len(ALL)


def test_ranks_may_differ_in_what_waits_for_a_hook(ranks: Ranks) -> None:
    runs, seen = [], [0, 0]
    for index in range(2):
        ddp = wrapped(Setting(), ranks)

        def count(gradient: Tensor, index: int = index) -> Tensor:
            seen[index] += 1
            return 2 * gradient

        if ranks.rank == 0:
            ddp.module.get_parameter("layers.3.weight").register_hook(count)
        runs.append(train(inlined(ddp) if index else ddp, Setting(), ranks, []))
    assert alike(ranks, runs[1], runs[0])
    assert seen == ([STEPS, STEPS] if ranks.rank == 0 else [0, 0])


@pytest.mark.parametrize("batches", ["more on later ranks", "none on rank 0", "none on the last rank"])
def test_uneven_inputs_under_join_give_eagers_gradients(ranks: Ranks, batches: str) -> None:
    counts = {
        "more on later ranks": 2 + ranks.rank,
        "none on rank 0": 3 if ranks.rank else 0,
        "none on the last rank": 0 if ranks.rank == ranks.size - 1 else 3,
    }
    count = counts[batches] if ranks.size > 1 else 2

    def run(ddp: Any) -> list[Gradients]:
        gradients = []
        with ddp.join():
            for step in range(count):
                backward(loss(ddp(batch(ranks, step))))
                gradients.append(gradients_of(ddp.module))
                ddp.zero_grad()
        return gradients

    expected = run(wrapped(Setting(), ranks))
    ddp = wrapped(Setting(), ranks)
    handed: list[str] = []
    with hand_overs(ddp, handed.append):
        gradients = run(inlined(ddp))
    assert alike(ranks, gradients, expected)
    assert sorted(handed) == sorted(ALL * count)


@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
def test_a_built_in_hook_reduces_what_was_handed_over(ranks: Ranks, kind: str) -> None:
    c10d: Any = dist
    modules: list[Any] = [wrapped(Setting(), ranks) for _ in range(3)]
    for ddp in modules[:2]:
        ddp._register_builtin_comm_hook(c10d.BuiltinCommHookType.__members__[kind])
    calls = [modules[0], inlined(modules[1]), modules[2]]
    hooked, own, unhooked = (train(call, Setting(), ranks, []) for call in calls)
    # summed in half precision: in another order on three ranks, which shows
    assert alike(ranks, own, hooked, rounding=1e-2)
    assert alike(ranks, own, unhooked) == (kind == "ALLREDUCE")


def test_a_list_of_caps_shapes_the_buckets(ranks: Ranks) -> None:
    setting = Setting(arguments={"bucket_cap_mb": None, "bucket_cap_mb_list": [LAYER_MB, 3 * LAYER_MB]})
    expected = train(build(setting, ranks), setting, ranks, [])
    ddp = build(setting, ranks)
    gradients, events = train_watched(ddp, setting, ranks)
    assert alike(ranks, gradients, expected)
    assert all(len([*filter(is_bucket, noted)]) == 3 for noted in events)
    assert all(not is_bucket(noted[-2]) for noted in events)


def test_with_buckets_ddp_the_reducer_rebuilds_eagers_buckets(ranks: Ranks) -> None:
    modules = [wrapped(Setting(), ranks) for _ in range(2)]
    seen: list[list[Buckets]] = [[], []]
    for ddp, notes in zip(modules, seen, strict=True):
        ddp.register_comm_hook(None, hook_that_sees(ddp, functools.partial(append_to_last, notes)))
    before = modules[1].reducer
    calls = [modules[0], inlined(modules[1], buckets="ddp")]
    expected, gradients = (
        train(call, Setting(), ranks, notes) for call, notes in zip(calls, seen, strict=True)
    )
    assert alike(ranks, gradients, expected)
    assert seen[1] == seen[0]
    assert modules[1].reducer is before
    assert imposed_plan(modules[1]) is None


def append_to_last(notes: list[Buckets], names: tuple[str, ...]) -> None:
    notes[-1].append(names)


def test_ignored_parameters_are_neither_reduced_nor_handed_over(ranks: Ranks) -> None:
    def ignoring() -> DistributedDataParallel:
        model = Tower().to(ranks.device)
        wrapper: Any = DistributedDataParallel
        wrapper._set_params_and_buffers_to_ignore_for_model(model, ["layers.1.weight"])
        return DistributedDataParallel(model, bucket_cap_mb=LAYER_MB)

    expected = train(ignoring(), Setting(), ranks, [])
    ddp = ignoring()
    gradients, events = train_watched(ddp, Setting(), ranks)
    everywhere = ranks.gather([g.cpu() for g in gradients[0] if g is not None])
    own = [name for name, _ in ddp.module.named_parameters() if not name.startswith("frozen")]
    differing = {name for name, *each in zip(own, *everywhere, strict=True) if not all_equal(each)}
    assert alike(ranks, gradients, expected)
    assert differing == ({"layers.1.weight"} if ranks.size > 1 else set())
    assert all(("layers.1.weight",) not in noted for noted in events)


def all_equal(tensors: list[Tensor]) -> bool:
    return all(torch.equal(tensors[0], tensor) for tensor in tensors)


class Images(nn.Module):
    """Convolutions with batch normalisation, and a weight that is read on both sides of a graph break."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))
        self.shared = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.first(x)).relu()
        x = self.shared(x.movedim(1, -1)).movedim(-1, 1)
        torch._dynamo.graph_break()
        x = self.norms[1](self.second(x)).relu().mean((2, 3))
        out: Tensor = self.shared(x)
        return out


def test_momentum_clipping_and_buffers_give_eagers_parameters_after_five_steps(ranks: Ranks) -> None:
    def run(ddp: Any, call: Any) -> Gradients:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(ranks.rank)
        for _ in range(5):
            optimizer.zero_grad()
            backward(loss(call(torch.randn(3, 2, 8, 8, generator=generator).to(ranks.device))))
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()
        return [value.detach().clone() for value in ddp.state_dict().values()]

    modules = [DistributedDataParallel(Images().to(ranks.device), bucket_cap_mb=1e-5) for _ in range(2)]
    handed: list[str] = []
    expected = run(modules[0], modules[0])
    with hand_overs(modules[1], handed.append):
        own = run(modules[1], inlined(modules[1]))
    assert alike(ranks, [own], [expected], rounding=1e-4)
    names = {name for name, _ in modules[1].module.named_parameters() if not name.startswith("shared")}
    assert sorted(handed) == sorted([*names] * 5)


def test_twin_modules_that_are_trained_in_turn_do_not_meet(ranks: Ranks) -> None:
    eager, first, second = (wrapped(Setting(), ranks) for _ in range(3))
    torch._dynamo.reset()
    calls = [ddpopt.compile(ddp, backend="aot_eager", strategy="inline") for ddp in (first, second)]
    runs: list[list[Gradients]] = [[], [], []]
    handed: list[list[str]] = [[], []]
    with hand_overs(first, handed[0].append), hand_overs(second, handed[1].append):
        for step in range(STEPS):
            for call, gradients in zip((eager, *calls), runs, strict=True):
                call.zero_grad()
                backward(loss(call(batch(ranks, step))))
                gradients.append(gradients_of(call.module))
    assert alike(ranks, runs[1], runs[0])
    assert same(runs[2], runs[1])
    assert handed == [ALL * STEPS] * 2


def test_a_second_backward_through_a_retained_graph_does_as_eager_does(ranks: Ranks) -> None:
    def run(ddp: Any) -> list[Gradients]:
        gradients = []
        for step in range(STEPS):
            total = loss(ddp(batch(ranks, step)))
            for retain in (True, False):
                torch.autograd.backward(total, retain_graph=retain)
                gradients.append(gradients_of(ddp.module))
            ddp.zero_grad()
        return gradients

    expected = run(wrapped(Setting(), ranks))
    gradients = run(inlined(wrapped(Setting(), ranks)))
    assert alike(ranks, gradients, expected)


def test_hooks_on_parameters_run_once_a_step_with_eagers_values(ranks: Ranks) -> None:
    def run(ddp: DistributedDataParallel, call: Any) -> list[Gradients]:
        seen: list[Tensor] = []
        weight, bias = (ddp.module.get_parameter(f"layers.1.{name}") for name in ("weight", "bias"))
        weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        train(call, Setting(), ranks, [])
        assert len(seen) == 2 * STEPS
        return [[*sorted(seen, key=lambda value: value.dim())]]

    expected, ddp = wrapped(Setting(), ranks), wrapped(Setting(), ranks)
    assert alike(ranks, run(ddp, inlined(ddp)), run(expected, expected))
