"""Steps of plain modules: what they train is, bit for bit, what eager DDP trains."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_leaves

import ddpopt
from ddpopt.errors import DdpoptError, PlanMismatchError, UsageError
from ddpopt.ranks.group import Ranks
from ddpopt.step.sharding import owners_in
from tests.support.refusals import refusal

if torch.__version__ < "2.13":
    pytest.skip("ddpopt.train_step needs torch 2.13 or newer", allow_module_level=True)

WIDTH, ROUNDS, CAP_MB = 12, 4, 6e-4
Models = Sequence[Any]


class Layers(nn.Module):
    """Layers with BatchNorm, dropout, a tied and a frozen one, and a buffer that the output depends on."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = next(self.layers[0].parameters())
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("scale", torch.rand(()) + 1)

    def forward(self, x: Tensor) -> Any:
        """(batch, WIDTH) to the same shape."""
        for layer in (*self.layers, self.tied, self.frozen):
            x = nn.functional.dropout(torch.tanh(self.norm(layer(x))), 0.2)
        with torch.no_grad():
            self.scale.mul_(1 + x.mean())
        return x * self.scale


def local(model: Any) -> Any:
    """A block in which DDP reduces nothing; a plain module needs none."""
    return model.no_sync() if isinstance(model, DDP) else nullcontext()


def loss_of(model: Any, x: Tensor) -> Any:
    return (model(x) - x).square().mean()


def plain(models: Models, optimizers: Any, x: Tensor) -> Any:
    loss = loss_of(models[0], x)
    loss.backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    return loss.detach()


def clipped(models: Models, optimizers: Any, x: Tensor) -> Any:
    optimizers[0].zero_grad()
    loss_of(models[0], x).backward()
    norm = clip_grad_norm_(models[0].parameters(), 0.1)
    optimizers[0].step()
    return norm  # gradients are left


def accumulated(models: Models, optimizers: Any, x: Tensor) -> Any:
    for part in range(2):
        with local(models[0]):
            loss_of(models[0], x * part).backward()
    return plain(models, optimizers, x)


def kept(models: Models, optimizers: Any, x: Tensor) -> Any:
    """The sum of gradients stays in memory of its own."""
    with local(models[0]):
        loss_of(models[0], x + 1).backward()
    loss_of(models[0], x).backward()
    optimizers[0].step()
    optimizers[0].zero_grad(set_to_none=False)


def adversarial(models: Models, optimizers: Any, x: Tensor) -> Any:
    """The second model is trained on the output of the first, and the first through the second."""
    made, judged = models
    judged_loss = loss_of(judged, made(x).detach())
    judged_loss.backward()
    optimizers[1].step()
    with local(judged):
        made_loss = judged(made(x)).square().mean()
    made_loss.backward()
    optimizers[0].step()
    for each in optimizers:
        each.zero_grad()
    return judged_loss.detach(), made_loss.detach()


def summed(models: Models, optimizers: Any, x: Tensor) -> Any:
    loss = loss_of(models[0], x) + loss_of(models[1], x)
    loss.backward()
    for each in optimizers:
        each.step()
        each.zero_grad()
    return loss.detach()


STEPS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (plain, clipped, accumulated, kept, adversarial, summed)
}


def made(count: int, rank: int) -> list[nn.Module]:
    torch.manual_seed(rank)  # ranks begin with different parameters
    return [Layers() for _ in range(count)]


def momentum(model: Any) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.1, momentum=0.9)


def fused(model: Any) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), 0.01, fused=True)


def made_when_built(model: Any) -> optim.Optimizer:
    return optim.Adagrad(model.parameters(), 0.1, foreach=False)


def several(model: Any) -> optim.Optimizer:
    parameters = [*model.parameters()]
    groups: list[dict[str, Any]] = [{"params": parameters[:3], "lr": 0.2}, {"params": parameters[3:]}]
    return optim.RMSprop(groups, 0.01, foreach=True)


def trained(models: Models, step: Any, rank: int, make: Any = momentum) -> tuple[list[Any], list[Any]]:
    """All that each step returns and leaves in the models; and the states of optimizers, in the end."""
    optimizers = [make(each) for each in models]
    found = []
    for place in range(ROUNDS):
        torch.manual_seed(10 * place + rank)
        returned = step(models, optimizers, torch.randn(6, WIDTH))
        left = [[[each, each.grad] for each in model.parameters()] for model in models]
        buffers = [[*model.buffers()] for model in models]
        leaves = tree_leaves([returned, left, buffers])
        found += [each.clone() if isinstance(each, Tensor) else each for each in leaves]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
    states = [each.state.get(p, {}) for each in optimizers for g in each.param_groups for p in g["params"]]
    return found, [tree_leaves(state) for state in states]


def equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def all_equal(ranks: Ranks, found: Any, expected: Any) -> bool:
    """Whether models and optimizers are equal on all ranks."""
    models, states = found
    kept = [equal(state, wanted) for state, wanted in zip(states, expected[1], strict=True)]
    return ranks.gather((equal(models, expected[0]), kept)) == [(True, [True] * len(states))] * ranks.size


KINDS: dict[str, Any] = {"replicate": ddpopt.Replicate, "shard": ddpopt.ShardOptimizer}


@pytest.mark.parametrize("fusion", ["concat", "coalesced"])
@pytest.mark.parametrize("name", STEPS)
def test_plain_modules_are_trained_as_in_ddp(ranks: Ranks, name: str, fusion: Any) -> None:
    count = 2 if name in ("adversarial", "summed") else 1
    syncs = name != "adversarial"  # DDP copies buffers before each forward, and a model has two there
    sizes: Any = {"bucket_cap_mb": CAP_MB}
    wrapped = [DDP(each, forward_sync_buffers=syncs, **sizes) for each in made(count, ranks.rank)]
    expected = trained(wrapped, STEPS[name], ranks.rank)
    how = ddpopt.Replicate(broadcast_buffers=syncs, **sizes)
    step = ddpopt.train_step(STEPS[name], backend="aot_eager", fusion=fusion, parallel=how)
    found = trained(made(count, ranks.rank), step, ranks.rank)
    assert all_equal(ranks, found, expected)
    for graph in step.graphs:  # each bucket is sent once, however many backward passes there are
        sent = [node for node in graph.gm.graph.nodes if "all_reduce" in str(node.target)]
        assert len(sent) == sum(len(plan.buckets) for plan in graph.plans) > count


@pytest.mark.parametrize("make", [momentum, fused, several, made_when_built])
@pytest.mark.parametrize("name", ["plain", "clipped", "accumulated", "kept", "adversarial"])
def test_each_rank_updates_its_own_parameters_as_in_ddp(ranks: Ranks, name: str, make: Any) -> None:
    count = 2 if name == "adversarial" else 1
    syncs: Any = {"broadcast_buffers": False} if name == "adversarial" else {}
    wrapped = [DDP(each, forward_sync_buffers=not syncs) for each in made(count, ranks.rank)]
    expected = trained(wrapped, STEPS[name], ranks.rank, make)
    how = ddpopt.ShardOptimizer(**syncs)
    step = ddpopt.train_step(STEPS[name], backend="aot_eager", parallel=how)
    models, states = trained(made(count, ranks.rank), step, ranks.rank, make)
    here = [bool(state) for state in states]
    pairs = zip(states, expected[1], strict=True)
    kept = [not state or equal(state, wanted) for state, wanted in pairs]
    said = ranks.gather((equal(models, expected[0]), all(kept), here))
    assert [each[:2] for each in said] == [(True, True)] * ranks.size
    on_ranks = [sum(each) for each in zip(*(held for _, _, held in said), strict=True)]
    assert on_ranks == [*map(bool, expected[1])]  # each state is on one rank
    # a gradient that only its owner reads is sent to it alone
    sent = {str(node.target) for node in step.graphs[-1].gm.graph.nodes if "c10d" in str(node.target)}
    assert any("reduce_scatter" in each for each in sent) == (name in ("plain", "accumulated", "adversarial"))
    assert any("all_reduce" in each for each in sent) == (name in ("clipped", "kept", "adversarial"))


def test_buckets_are_those_of_a_step_in_ddp(ranks: Ranks) -> None:
    plans = []
    for parallel in (None, ddpopt.Replicate(bucket_cap_mb=CAP_MB)):
        models: Any = made(1, 0)
        models = models if parallel else [DDP(models[0], bucket_cap_mb=CAP_MB)]
        step = ddpopt.train_step(plain, backend="aot_eager", parallel=parallel)
        trained(models, step, ranks.rank)
        plans.append([(each.params, each.nbytes) for each in step.plans[0].buckets])
    assert plans[0] == plans[1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_ddp_ignores_stays_of_each_rank(ranks: Ranks, kind: str) -> None:
    def models() -> list[Any]:
        found = made(1, ranks.rank)
        ignored = ["layers.1.weight", "norm.running_var"]
        ignore: Any = DDP._set_params_and_buffers_to_ignore_for_model
        ignore(found[0], ignored)
        return found

    expected = trained([DDP(models()[0])], plain, ranks.rank)
    step = ddpopt.train_step(plain, backend="aot_eager", parallel=KINDS[kind]())
    found = trained(models(), step, ranks.rank)
    assert [*ranks.gather(equal(found[0], expected[0]))] == [True] * ranks.size


def test_buffers_may_be_copied_with_the_first_step_only(ranks: Ranks) -> None:
    how = ddpopt.Replicate(broadcast_buffers=False)
    step = ddpopt.train_step(plain, backend="aot_eager", parallel=how)
    expected = trained([DDP(made(1, ranks.rank)[0], forward_sync_buffers=False)], plain, ranks.rank)
    assert all_equal(ranks, trained(made(1, ranks.rank), step, ranks.rank), expected)


def adam(model: Any) -> optim.Optimizer:
    return optim.Adam(model.parameters(), 0.01, fused=True)


def test_an_optimizers_state_goes_to_eager_ddp_and_to_another_number_of_ranks(
    ranks: Ranks,
) -> None:
    how = ddpopt.ShardOptimizer(broadcast_buffers=False)
    step = ddpopt.train_step(plain, backend="aot_eager", parallel=how)
    (model,) = made(1, 0)
    optimizer = adam(model)
    for place in range(2):
        torch.manual_seed(place + ranks.rank)
        step([model], [optimizer], torch.randn(6, WIDTH))
    whole = how.state_dict(optimizer)
    trained_parameters = sum(each.requires_grad for each in model.parameters())
    assert len(whole["state"]) == trained_parameters > len(optimizer.state)
    weights = {name: each.clone() for name, each in model.state_dict().items()}

    def resumed(parallel: Any, group: Any) -> list[Tensor]:
        """The parameters after another step; without `parallel`, in eager DDP."""
        (own,) = made(1, 0)
        own.load_state_dict(weights)
        own_optimizer = adam(own)
        state = copy.deepcopy(whole)  # an optimizer goes on to use the tensors that it loads
        run: Any = plain
        models: list[Any] = [own]
        if parallel is None:
            own_optimizer.load_state_dict(state)
            models = [DDP(own, process_group=group, forward_sync_buffers=False)]
        else:
            parallel.load_state_dict(own_optimizer, state, own)
            assert (len(own_optimizer.state) == trained_parameters) == (group is not None)
            run = ddpopt.train_step(plain, backend="aot_eager", parallel=parallel)
        torch.manual_seed(9 + ranks.rank)
        run(models, [own_optimizer], torch.randn(6, WIDTH))
        return [each.detach() for each in own.parameters()]

    alone = [dist.new_group([rank]) for rank in range(ranks.size)][ranks.rank]
    for group in (None, alone):  # two ranks, and one
        parallel = ddpopt.ShardOptimizer(group, broadcast_buffers=False)
        found, expected = resumed(parallel, group), resumed(None, group)
        assert ranks.gather(equal(found, expected)) == [True] * ranks.size


def test_a_step_may_be_a_method_and_keeps_no_module_alive(ranks: Ranks) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = made(1, ranks.rank)[0]
            self.optimizer = optim.SGD(self.model.parameters(), 0.1)

        def plain_step(self, x: Tensor) -> Any:
            return plain([self.model], [self.optimizer], x)

        step = ddpopt.train_step(plain_step, backend="aot_eager", parallel=ddpopt.Replicate())

    trainer = Trainer()
    for _ in range(2):
        trainer.step(torch.randn(6, WIDTH))
    first = ranks.gather([*trainer.model.parameters()])
    assert all(map(torch.equal, first[0], first[1]))
    alive = weakref.ref(trainer.model)
    del trainer, first
    gc.collect()
    assert alive() is None


def unwrapped(model: Any, x: Tensor) -> Any:
    loss_of(model, x).backward()


def read_early(model: Any, x: Tensor) -> Any:
    loss_of(model, x).backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    loss_of(model, x).backward()
    return norm


def closed(models: Models, optimizers: Any, x: Tensor) -> Any:
    return optimizers[0].step(lambda: loss_of(models[0], x))


def test_a_closure_is_refused_where_the_state_is_divided(ranks: Ranks) -> None:
    models = made(1, 0)
    step = ddpopt.train_step(closed, backend="aot_eager", parallel=ddpopt.ShardOptimizer())
    optimizers = [made_when_built(models[0])]
    assert "called with a closure" in refusal(
        lambda: step(models, optimizers, torch.ones(6, WIDTH)), DdpoptError
    )
    assert len(optimizers[0].state) == len([*models[0].parameters()])  # as before


def test_each_group_gets_the_parameters_of_its_first_rank(ranks: Ranks) -> None:
    (model,) = made(1, ranks.rank)
    alone = [dist.new_group([rank]) for rank in range(ranks.size)][ranks.rank]
    for group in (alone, None):
        step = ddpopt.train_step(plain, backend="aot_eager", parallel=ddpopt.Replicate(group))
        step([model], [momentum(model)], torch.randn(6, WIDTH))
    first, second = ranks.gather([each.detach() for each in model.parameters()])
    assert equal(first, second)


def branching(models: Models, optimizers: Any, x: Tensor) -> Any:
    plain(models, optimizers, x)
    return x if x.sum() > 0 else -x


def test_an_optimizer_whose_state_is_divided_is_called_in_steps_only(ranks: Ranks) -> None:
    models = made(1, 0)
    optimizers = [momentum(models[0])]
    how = ddpopt.ShardOptimizer()
    failing = ddpopt.train_step(branching, backend="aot_eager", parallel=how)
    refusal(lambda: failing(models, optimizers, torch.randn(6, WIDTH)), DdpoptError)
    optimizers[0].step()  # nothing was captured, so its state is whole
    step = ddpopt.train_step(plain, backend="aot_eager", parallel=how)
    for _ in range(3):
        step(models, optimizers, torch.randn(6, WIDTH))
    assert len(step.graphs) == 2  # without and with momentum
    assert "outside of the train step" in refusal(optimizers[0].step, UsageError)
    assert ranks.gather(len(optimizers[0].state))[0] < len([*models[0].parameters()])


def test_parameters_are_divided_by_their_sizes_and_keep_their_owners() -> None:
    group = SimpleNamespace(group_name="a group of a test", size=lambda: 3)
    sizes = [5, 40, 1, 30, 30, 0, 8]
    parameters = [torch.empty(size) for size in sizes]
    owners = owners_in(group, parameters)
    held = [sum(each.numel() for each in parameters if owners[id(each)] == rank) for rank in range(3)]
    assert held == [40, 38, 36]
    more = [torch.empty(100), *parameters[::-1]]  # of a module that contains the first one
    assert owners_in(group, more).items() >= owners.items()
    assert owners_in(SimpleNamespace(group_name="alone", size=lambda: 1), more) == dict.fromkeys(
        map(id, more), 0
    )


class Flat(nn.Module):
    """Parameters that are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(3, WIDTH, WIDTH)
        self.weights = nn.ParameterList(nn.Parameter(each) for each in memory)

    def forward(self, x: Tensor) -> Any:
        """(batch, WIDTH) to the same shape."""
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_may_share_a_storage(ranks: Ranks, kind: str) -> None:
    def models() -> list[Any]:
        torch.manual_seed(3)
        return [Flat()]

    expected = trained([DDP(models()[0])], plain, ranks.rank)
    step = ddpopt.train_step(plain, backend="aot_eager", parallel=KINDS[kind]())
    found = trained(models(), step, ranks.rank)
    assert ranks.gather(equal(found[0], expected[0])) == [True] * ranks.size


HIDDEN: list[nn.Module] = []


def hidden(model: Any, x: Tensor) -> Any:
    return unwrapped(model, trained_elsewhere(x))


def trained_elsewhere(x: Tensor) -> Any:
    return HIDDEN[0](x)


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "a DDP module": (unwrapped, lambda: DDP(Layers()), "takes plain modules, got the DDP module"),
    "a gradient read in between": (read_early, Layers, "Call backward() once and add the losses"),
    "a module out of sight": (hidden, Layers, "parameters of other modules have the shapes (12, 12), (12,)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_so_is_said(ranks: Ranks, name: str) -> None:
    function, make, words = REFUSED[name]
    torch.manual_seed(0)
    HIDDEN[:] = [nn.Linear(WIDTH, WIDTH)]
    step = ddpopt.train_step(function, backend="aot_eager", parallel=ddpopt.Replicate())
    assert words in refusal(lambda: step(make(), torch.ones(6, WIDTH)), DdpoptError)


def test_ranks_whose_modules_differ_all_raise_before_anything_is_sent(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False))
    if ranks.rank:
        model[1].register_buffer("extra", torch.ones(3))
    step = ddpopt.train_step(unwrapped, backend="aot_eager", parallel=ddpopt.Replicate())
    refusal(lambda: step(model, torch.ones(6, WIDTH)), PlanMismatchError)
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"parallel": "replicate"}, "expected ddpopt.Replicate() or None, got 'replicate'"),
        ({"parallel": ddpopt.Replicate(), "fallback": "inline"}, "needs a DDP module"),
    ],
)
def test_arguments_that_cannot_be_used_are_said(arguments: Any, words: str) -> None:
    assert words in refusal(lambda: ddpopt.train_step(unwrapped, **arguments))
    assert "bucket_cap_mb" in refusal(lambda: ddpopt.Replicate(bucket_cap_mb=float("nan")), UsageError)
