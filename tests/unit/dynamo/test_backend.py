"""The three ways in, on one rank: each cuts at the plan's buckets, trains as eager DDP, leaves no trace."""

import contextlib
import copy
import functools
import gc
import pickle
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest.mock import create_autospec

import pytest
import torch
import torch._inductor.compile_fx as compile_fx
from torch import Tensor, fx, nn
from torch._C._distributed_c10d import GradBucket
from torch._dynamo.backends import distributed
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import InvalidBackend
from torch._inductor.graph import GraphLowering
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddpopt
import ddpopt.dynamo.backend
from ddpopt.ddp.impose import impose, imposed_plan
from ddpopt.ddp.state import state_of
from ddpopt.dynamo.backend import DdpoptBackend
from ddpopt.dynamo.model_graphs import plan_for_reducer
from ddpopt.errors import UsageError
from ddpopt.graph.artifacts import say_once
from ddpopt.observation.observe import observe
from ddpopt.planning.plan import Plan, Strategy
from ddpopt.split.partition import partition
from ddpopt.strategies.protocol import Planned
from ddpopt.testing import drawn
from tests.support.models import averaged, changing
from tests.support.refusals import refusal
from tests.support.rehearsing import Broken, Linears, params
from tests.support.tracing import Recorder
from tests.support.turns import in_turn

pytestmark = pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")
WIDTH = 16
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
ONE_LAYER_MB = LAYER_BYTES / 2**20
Wrap = Callable[[DistributedDataParallel, Any], Callable[..., Any]]


class Net(Linears):
    """Four linear layers with an activation each."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4)


def seeded(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return factory()


def ddp_of(factory: Callable[[], nn.Module] = Net, **kwargs: Any) -> DistributedDataParallel:
    return DistributedDataParallel(seeded(factory), **{"bucket_cap_mb": ONE_LAYER_MB, **kwargs})


def rows(count: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(output: Any) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([tensor.square().sum() for tensor in outputs]).sum()


def step(call: Callable[..., Any], model: nn.Module, x: Tensor, *numbers: float) -> list[Tensor]:
    """Output and gradients of one training step."""
    model.zero_grad()
    torch.manual_seed(5)
    output = call(x, *numbers)
    loss_of(output).backward()  # type: ignore[no-untyped-call]  # of torch
    outputs = list(output) if isinstance(output, tuple) else [output]
    return [*outputs, *(cast(Tensor, parameter.grad) for parameter in model.parameters())]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)


def assert_as_eager(trained: Callable[[Any], list[list[Tensor]]], strategy: Strategy) -> None:
    """Steps of training, told how to wrap a module, are the same compiled as in eager, bit for bit."""
    with torch._dynamo.config.patch(optimize_ddp=False):  # which fails at caps below 1 MiB
        expected = trained(lambda ddp: ddp)
    torch._dynamo.reset()
    found = trained(functools.partial(ddpopt.compile, backend="aot_eager", strategy=strategy))
    assert all(map(same, found, expected))


def assert_trains_as_eager(call: Any, ddp: nn.Module, by_eager: nn.Module, steps: int = 1) -> None:
    """Both have the same outputs and gradients, bit for bit, at each step."""
    for seed in range(steps):
        assert same(step(call, ddp, rows(seed=seed)), step(by_eager, by_eager, rows(seed=seed)))


def plan_in_force(ddp: DistributedDataParallel) -> Plan:
    plan = imposed_plan(ddp)
    assert plan is not None
    return plan


def layers_of(plan: Plan) -> list[str]:
    """The layers whose parameters each bucket holds."""
    return [" ".join(dict.fromkeys(name.rpartition(".")[0] for name in b.params)) for b in plan.buckets]


STRATEGIES: tuple[Strategy, ...] = ("split", "inline")
GROUP = "torch_dynamo_backends"
PROJECT = tomllib.loads((Path(ddpopt.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
NAMES = PROJECT["project"]["entry-points"][GROUP]
FOUR_LAYERS = ["layers.3", "layers.2", "layers.1", "layers.0"]


# -------------------------------------------------------------------------------------- the ways in


def by_compile(ddp: DistributedDataParallel, backend: Any) -> Callable[..., Any]:
    return cast(Callable[..., Any], ddpopt.compile(ddp, backend=backend, strategy="split"))


def by_backend(ddp: DistributedDataParallel, backend: Any) -> Callable[..., Any]:
    return torch.compile(ddp, backend=DdpoptBackend(backend, strategy="split"))


def by_replacing(ddp: DistributedDataParallel, backend: Any) -> Callable[..., Any]:
    compiled = torch.compile(ddp, backend=backend)

    def call(*inputs: Any) -> Any:
        with ddpopt.replacing_ddp_optimizer():
            return compiled(*inputs)

    return call


WAYS: list[Wrap] = [by_compile, by_backend, by_replacing]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@every_way
def test_each_way_in_cuts_at_the_buckets_has_ddp_follow_and_trains_as_in_eager(way: Wrap) -> None:
    eager, ddp, recorder = ddp_of(), ddp_of(), Recorder()
    call = way(ddp, recorder)
    assert_trains_as_eager(call, ddp, eager, steps=3)
    plan = plan_in_force(ddp)
    assert layers_of(plan) == FOUR_LAYERS
    pairs = [(f"layers.{i}.weight", f"layers.{i}.bias") for i in range(4)]
    assert params(plan.segments) == pairs
    assert recorder.calls == 2  # the first layer, whose input needs no gradient; and three twins


@pytest.mark.parametrize("strategy", ["auto", "split", "inline"])
@pytest.mark.parametrize("compiler", ["inductor", "aot_eager", "eager"])
def test_each_strategy_on_each_compiler_is_one_backend_with_a_name(strategy: str, compiler: str) -> None:
    name = f"ddpopt-{strategy}-{compiler}".replace("-auto", "").replace("-inductor", "")
    found = EntryPoint(name, NAMES[name], GROUP).load()
    assert (found.strategy, found.compiler) == (strategy, lookup_backend(compiler))
    assert found is EntryPoint(name, NAMES[name], GROUP).load()
    assert "which is ddpopt itself; pass the backend that it names" in refusal(lambda: DdpoptBackend(found))
    if compiler != "inductor":
        for _ in range(2):  # Dynamo reuses the first one's code for the second
            ddp = ddp_of()
            assert_trains_as_eager(torch.compile(ddp, backend=found), ddp, ddp_of(), steps=2)
            assert layers_of(plan_in_force(ddp)) == FOUR_LAYERS
        other = ddp_of(bucket_cap_mb=25)
        assert_trains_as_eager(torch.compile(other, backend=found), other, ddp_of(), steps=2)
        assert state_of(other).keeps_buckets  # it reuses code whose plan has other limits


def test_code_that_was_compiled_without_ddp_answers_the_ranks_that_compile() -> None:
    model = seeded(Net)
    model.compile(backend=DdpoptBackend("eager"))
    model(rows())
    ddp = DistributedDataParallel(model)
    step(ddp, ddp, rows())
    assert state_of(ddp).keeps_buckets  # as all ranks were asked, and none has a plan


def test_torch_finds_these_names_and_refuses_another_with_its_own_error() -> None:
    installed = {entry.name: entry.value for entry in entry_points(group=GROUP) if "ddpopt" in entry.value}
    assert installed == NAMES, "the installed ddpopt is older: run 'pip install -e .'"
    assert {*NAMES} < {*torch.compiler.list_backends()}
    with pytest.raises(InvalidBackend, match="Invalid backend: 'ddpopt-spilt'"):
        torch.compile(ddp_of(), backend="ddpopt-spilt")


def sequential() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


class PassedOnExpanded(nn.Module):
    """What comes out of ``no_grad`` unchanged gets its gradient, also after calls that are expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third = self.layers
        x = self.attention(x[None], x[None], x[None], need_weights=False)[0]
        with torch.no_grad():
            same, seen = x.contiguous(), x[0].t()
        x = second(first(same))
        with torch.no_grad():
            same, turned = x.contiguous(), x[0].t()
        return third(same) + turned.sum() + x, seen


@pytest.mark.parametrize("layers", [1 / 64, 1])
def test_what_no_grad_returns_of_an_expanded_call_has_its_gradient(layers: float) -> None:
    options = {"bucket_cap_mb": ONE_LAYER_MB * layers}
    ddp, eager = ddp_of(PassedOnExpanded, **options), ddp_of(PassedOnExpanded, **options)
    compiled = ddpopt.compile(ddp, backend="aot_eager", strategy="split")
    found, expected = step(compiled, ddp, rows()), step(eager, eager, rows())
    assert len(plan_in_force(ddp).segments) > 2
    torch.testing.assert_close(found, expected)


class TurnsGradOn(Net):
    forward = torch.enable_grad()(Linears.forward)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_without_gradient_may_turn_it_on(strategy: Strategy) -> None:
    compiled = ddpopt.compile(ddp_of(TurnsGradOn), backend="aot_eager", strategy=strategy)
    with torch.no_grad():
        assert torch.equal(compiled(rows()), ddp_of(TurnsGradOn)(rows()))


@pytest.mark.parametrize(
    ("name", "options", "calls"),
    [
        ("compiler", {"options": {"depth": 3}}, 2),
        ("compiler", {"options": {"triton.cudagraphs": True}}, 4),
        ("compiler", {"mode": "reduce-overhead"}, 4),
        ("cudagraphs_like", {}, 4),
    ],
)
def test_options_reach_the_backend_each_time_it_is_called(name: str, options: Any, calls: int) -> None:
    # once for each distinct segment; for each one if code is tied to addresses
    seen: list[Any] = []

    def compiler(gm: fx.GraphModule, _: Any, **options: Any) -> Callable[..., Any]:
        seen.append(options)
        return gm.forward

    compiler.__name__ = name
    ddp, backend = ddp_of(), DdpoptBackend(compiler, strategy="split")
    step(torch.compile(ddp, backend=backend, **options), ddp, rows())
    assert seen == [options] * calls


@pytest.fixture
def config_patches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Inductor is called with; its signature is Inductor's own, and what it compiles runs in eager."""
    seen: list[dict[str, Any]] = []
    inductor = create_autospec(compile_fx.compile_fx)

    def compile_eager(gm: fx.GraphModule, _: Any, **arguments: Any) -> Callable[..., Any]:
        seen.append(arguments.get("config_patches") or {})
        return gm.forward

    inductor.side_effect = compile_eager
    monkeypatch.setattr(compile_fx, "compile_fx", inductor)
    return seen


@pytest.mark.parametrize("way", [ddpopt.compile, functools.partial(torch.compile, backend="ddpopt")])
@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"mode": "default"}, {}),
        ({"mode": "max-autotune-no-cudagraphs"}, {"max_autotune": True, "coordinate_descent_tuning": True}),
        ({"mode": "reduce-overhead"}, {"triton.cudagraphs": True}),
        ({"options": {"epilogue-fusion": False}}, {"epilogue_fusion": False}),
    ],
)
def test_mode_and_options_mean_what_they_mean_to_inductor(
    way: Callable[..., Any], options: Any, meant: dict[str, Any], config_patches: list[dict[str, Any]]
) -> None:
    ddp = ddp_of()
    step(way(ddp, **options), ddp, rows())
    assert config_patches
    assert all(patches.items() >= meant.items() for patches in config_patches)


def test_what_inductor_does_not_know_is_refused_with_torchs_own_words() -> None:
    with pytest.raises(RuntimeError, match="Unexpected optimization option speed, known options are"):
        ddpopt.compile(ddp_of(), options={"speed": True})
    with pytest.raises(RuntimeError, match="Unrecognized mode=fast, should be one of"):
        ddpopt.compile(ddp_of(), mode="fast")


def test_what_is_torch_compiles_own_among_the_options_stays_torchs() -> None:
    asked: list[Any] = []

    def keep_all(guards: Any) -> list[bool]:
        asked.extend(guards)
        return [True] * len(guards)

    ddp = ddp_of(sequential)
    step(ddpopt.compile(ddp, backend="eager", options={"guard_filter_fn": keep_all}), ddp, rows())
    assert asked


# ------------------------------------------------------------------------------------- what is compiled


class CompiledByClass(Net):
    """A module whose class says how its calls are compiled."""

    @property
    def _compiled_call_impl(self) -> Callable[..., Any]:  # type: ignore[override]
        return torch.compile(self._call_impl, backend="aot_eager")


def compiled_in_place() -> nn.Module:
    model = seeded(Net)
    model.compile(backend="aot_eager")
    return model


INNER: dict[str, Callable[[], nn.Module]] = {
    "compiled by its class": CompiledByClass,
    "compiled in place": compiled_in_place,
    "compiled already": lambda: cast(nn.Module, torch.compile(seeded(Net), backend="aot_eager")),
    "scripted": lambda: torch.jit.trace(seeded(Net), rows()),  # type: ignore[no-untyped-call]  # of torch
    "a DDP module": lambda: ddp_of(),
    "a module with one inside": lambda: nn.Sequential(ddp_of(), nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated")
@pytest.mark.parametrize(("inner", "strategy"), in_turn([(inner,) for inner in INNER], STRATEGIES))
def test_whatever_the_module_inside_is_it_trains_as_in_eager(inner: str, strategy: Strategy) -> None:
    def trained(wrap: Callable[[Any], Any]) -> list[list[Tensor]]:
        call = wrap(ddp := ddp_of(lambda: seeded(INNER[inner])))
        return [step(call, ddp, rows(seed=number)) for number in range(2)]

    assert_as_eager(trained, strategy)


class Recurrent(nn.Module):
    """Two layers of LSTM: one call, of which torch composes the backward in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        return self.recurrent(self.before(x))[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_recurrent_layer_trains_as_in_eager_where_dynamo_traces_it(strategy: Strategy) -> None:
    def trained(wrap: Callable[[Any], Any]) -> list[list[Tensor]]:
        call = wrap(ddp := ddp_of(Recurrent))
        return [step(call, ddp, rows(seed=number)) for number in range(2)]

    with torch._dynamo.config.patch(allow_rnn=True, optimize_ddp=False):
        expected = trained(lambda ddp: ddp)
        found = trained(functools.partial(ddpopt.compile, backend="aot_eager", strategy=strategy))
    torch.testing.assert_close(found, expected)  # compiled, it is not one kernel


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_with_computed_parameters_is_eagers(strategy: Strategy) -> None:
    def trained(wrap: Callable[[Any], Any]) -> list[list[Tensor]]:
        call = wrap(ddp := ddp_of())
        (name,) = (name for name, _ in call.named_parameters() if name.endswith("layers.1.weight"))

        def doubled(x: Tensor) -> Any:
            return torch.func.functional_call(call, {name: 2 * call.get_parameter(name)}, x)

        return [step(each, ddp, rows()) for each in (call, doubled, call, doubled)]

    assert_as_eager(trained, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_two_ddp_modules_reduce_one_gradient_the_outer_one_has_the_last_word(strategy: Any) -> None:
    def trained(wrap: Callable[[Any], Any]) -> list[list[Tensor]]:
        inner = ddp_of()
        outer = DistributedDataParallel(nn.Sequential(inner, seeded(Net)), bucket_cap_mb=ONE_LAYER_MB)
        inner.register_comm_hook(None, changing(lambda buffer: buffer * 0.5 + 1))
        outer.register_comm_hook(None, changing(lambda buffer: buffer * 0.25 + 1))
        call = wrap(outer)
        return [step(call, outer, rows()) for _ in range(3)]

    assert_as_eager(trained, strategy)


@pytest.mark.parametrize(
    ("factory", "strategy"), in_turn([(Net,), (lambda: ddp_of(),), (lambda: sequential(),)], STRATEGIES)
)
def test_fullgraph_is_about_the_module_inside(factory: Callable[[], nn.Module], strategy: Strategy) -> None:
    recorder = Recorder()
    eager, ddp = ddp_of(factory), ddp_of(factory)
    call = ddpopt.compile(ddp, backend=recorder, strategy=strategy, fullgraph=True)
    assert_trains_as_eager(call, ddp, eager, steps=2)
    assert recorder.calls
    broken = ddp_of(lambda: Broken(WIDTH, 4))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        ddpopt.compile(broken, backend="eager", strategy=strategy, fullgraph=True)(rows())


@pytest.mark.parametrize("options", [{}, {"fullgraph": True}], ids=str)
def test_the_module_inside_is_left_as_it_was(options: dict[str, Any]) -> None:
    ddp, recorder = ddp_of(sequential), Recorder()
    before = dict(ddp.module.__dict__)
    call = ddpopt.compile(ddp, backend=recorder, strategy="split", **options)
    for _ in range(2):
        step(call, ddp, rows())
    assert ddp.module.__dict__ == before
    distinct = recorder.calls
    ddp.module(rows(7))
    assert recorder.calls == distinct


# ------------------------------------------------------------------------------------------ copies


@pytest.mark.parametrize("used", [0, 1])
def test_two_compilations_of_one_module_may_both_be_used(used: int) -> None:
    ddp = ddp_of()
    calls = [ddpopt.compile(ddp, backend="aot_eager", strategy="split") for _ in range(2)]
    step(calls[used], ddp, rows())
    assert imposed_plan(ddp) is not None


def pickled(call: Any) -> Any:
    return pickle.loads(pickle.dumps(call))


class Wrapper(nn.Module):
    """As frameworks put around a DDP module: it converts, and hooks the output."""

    def __init__(self, ddp: nn.Module) -> None:
        super().__init__()
        self.ddp = ddp
        self.hooked = 0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.ddp(x.float() * 2) / 2
        output.register_hook(self.hook)  # type: ignore[no-untyped-call]  # of torch
        return output

    def hook(self, gradient: Tensor) -> None:
        self.hooked += 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_wrapper_of_a_ddp_module_is_compiled_with_it(strategy: Strategy) -> None:
    eager, ours = Wrapper(ddp_of()), Wrapper(ddp_of())
    call = ddpopt.compile(ours, backend="aot_eager", strategy=strategy)
    with ddpopt.observe(call) as seen:
        assert_trains_as_eager(call, ours, eager, steps=2)
    plan = plan_in_force(cast(DistributedDataParallel, ours.ddp))
    assert params(seen.buckets) == params(plan.buckets)
    assert ours.hooked == 2


def test_a_copy_of_a_backend_keeps_torch_from_cutting() -> None:
    backend = copy.deepcopy(DdpoptBackend("aot_eager", "split", buckets="ddp"))
    gc.collect()
    assert (backend.strategy, backend.buckets) == ("split", "ddp")
    assert distributed.DDPOptimizer(1, backend).compile_fn is backend


COPIES = list(product((Net, sequential), (copy.copy, copy.deepcopy, pickled)))


@pytest.mark.parametrize(("factory", "copied", "strategy"), in_turn(COPIES, STRATEGIES))
def test_a_copy_is_compiled_too(factory: Callable[[], nn.Module], copied: Any, strategy: Strategy) -> None:
    eager, ddp = ddp_of(factory), ddp_of(factory)
    call = copied(ddpopt.compile(ddp, backend="aot_eager", strategy=strategy))
    for number in range(2):
        with ddpopt.observe(call) as seen:
            found = step(call, call._orig_mod, rows(seed=number))
        assert same(found, step(eager, eager, rows(seed=number)))
        assert params(seen.buckets) == params(ddpopt.plan(eager, rows()).buckets)


# ------------------------------------------------------------------------------------- whose buckets


@pytest.mark.parametrize("layers", [1, 2])  # of others, gradients arrive in the order of a segment's inputs
def test_ddp_rebuilds_buckets_where_cuts_predicted(layers: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    def noted(*arguments: Any) -> Planned:
        planned = plan_for_reducer(*arguments)
        plans.append(planned.plan)
        return planned

    monkeypatch.setattr(ddpopt.dynamo.backend, "plan_for_reducer", noted)
    ddp = ddp_of(bucket_cap_mb=layers * ONE_LAYER_MB)
    reducer = ddp.reducer
    call = ddpopt.compile(ddp, backend="aot_eager", strategy="split", buckets="ddp")
    with observe(ddp) as observed:
        for _ in range(3):
            step(call, ddp, rows())
    assert [*map(set, params(observed.buckets))] == [*map(set, params(plans[0].buckets))]
    assert (ddp.reducer, imposed_plan(ddp)) == (reducer, None)


def test_a_plan_that_is_in_force_already_is_followed() -> None:
    ddp, recorder = ddp_of(), Recorder()
    plan = ddpopt.plan(seeded(Net), rows(), strategy="split", bucket_cap_mb=2 * ONE_LAYER_MB)
    impose(ddp, plan)
    step(ddpopt.compile(ddp, backend=recorder, strategy="split"), ddp, rows())
    assert plan_in_force(ddp) == plan
    assert recorder.calls == len(plan.segments) == 2


ATTENTION = (drawn.step("linear"), drawn.step("multihead_attention"))
attentive = drawn.DrawnModel(ATTENTION, width=WIDTH).program.model
"""Holds a composite call, which is traced while it is planned."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_first_forward_may_run_inside_a_checkpoint(strategy: Any) -> None:
    def trained(wrap: Callable[[Any], Any]) -> list[list[Tensor]]:
        call = functools.partial(checkpoint, wrap(ddp := ddp_of(attentive)), use_reentrant=False)
        return [step(call, ddp, rows()) for _ in range(2)]

    assert_as_eager(trained, strategy)


# ------------------------------------------------------------------------------------ never silent


def test_a_graph_outside_of_ddp_is_compiled_whole_and_says_so_once(said: Callable[[], list[str]]) -> None:
    recorder = Recorder()
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(seeded(Net), backend=DdpoptBackend(recorder))(rows())
    assert [len(gm.graph.find_nodes(op="call_method", target="relu")) for gm in recorder.graphs] == [4, 4]
    (only,) = said()
    assert only == "INFO: ddpopt: no DistributedDataParallel forward is running; the graph is compiled whole"


def test_how_a_graph_is_compiled_is_logged(said: Callable[[], list[str]]) -> None:
    for layers, calls in ((1, 2), (400, 1)):
        torch._dynamo.reset()
        ddp, recorder = ddp_of(bucket_cap_mb=layers * ONE_LAYER_MB), Recorder()
        step(ddpopt.compile(ddp, backend=recorder, strategy="split"), ddp, rows())
        assert recorder.calls == calls
    assert said() == [
        "INFO: ddpopt: 4 buckets, 4 segments, 2 of them distinct",
        "INFO: ddpopt: a graph is compiled whole: it has a single bucket",
    ]


def test_a_single_bucket_leaves_early_if_unused_parameters_wait(said: Callable[[], list[str]]) -> None:
    model = functools.partial(Linears, WIDTH, 5, order=(0, 1, 2, 3))
    ddp = ddp_of(model, bucket_cap_mb=4.5 * ONE_LAYER_MB, find_unused_parameters=True)
    step(ddpopt.compile(ddp, backend="aot_eager", strategy="inline"), ddp, rows())
    assert said() == ["INFO: ddpopt: 1 buckets, one graph"]


def test_a_graph_that_trains_nothing_says_so_and_fixes_no_plan(said: Callable[[], list[str]]) -> None:
    ddp, eager = ddp_of(), ddp_of()
    call = ddpopt.compile(ddp, backend="eager", strategy="split")
    with torch.no_grad():
        call(rows())
    assert said() == ["INFO: ddpopt: a graph is compiled whole: it trains no parameters"]
    assert_trains_as_eager(call, ddp, eager)
    assert layers_of(plan_in_force(ddp)) == FOUR_LAYERS


# ------------------------------------------------------------------------------------ never wrong


def test_a_cut_that_is_not_the_same_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_badly(gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
        stitched = partition(gm, plan)
        segment = cast(fx.GraphModule, stitched.get_submodule("segment_1"))
        relu = next(iter(segment.graph.find_nodes(op="call_method")))
        relu.target = "tanh"
        return stitched

    monkeypatch.setattr("ddpopt.split.strategy.partition", cut_badly)
    ddp, recorder = ddp_of(), Recorder()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="raised:\nCertificateError: "):
        ddpopt.compile(ddp, backend=recorder, strategy="split")(rows())
    assert recorder.calls == 0


def test_a_module_whose_compilation_failed_still_trains_in_eager() -> None:
    def failing(*_: Any) -> Callable[..., Any]:
        raise RuntimeError("no such operator")

    ddp, eager = ddp_of(), ddp_of()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such operator"):
        ddpopt.compile(ddp, backend=failing, strategy="split", fallback=None)(rows())
    assert DistributedDataParallel._active_ddp_module is None
    assert gc.isenabled()
    assert_trains_as_eager(ddp, ddp, eager, steps=3)


class FailingOnce:
    """A backend that damages and fails for the second graph that it gets, and compiles the others."""

    def __init__(self) -> None:
        self.compiled = 0
        self.calls = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.calls += 1
        if self.calls == 2:
            (activation,) = gm.graph.find_nodes(op="call_function", target=nn.functional.relu)
            activation.target = nn.functional.silu
            gm.recompile()
            raise RuntimeError("no such operator")
        self.compiled += 1
        return cast("Callable[..., Any]", lookup_backend("aot_eager")(gm, [*example_inputs]))


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of ddpopt."""
    return [
        each.getMessage() for each in caplog.records if (each.name, each.levelname) == ("ddpopt", "WARNING")
    ]


def unlike_layers() -> nn.Module:
    """Layers of which no two compile to the same code."""
    layers = [nn.Linear(WIDTH + place, WIDTH + place + 1) for place in range(4)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def test_a_segment_for_which_the_backend_fails_runs_uncompiled_and_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    say_once.cache_clear()
    ddp, eager = ddp_of(unlike_layers), ddp_of(unlike_layers)
    failing = FailingOnce()
    compiled = ddpopt.compile(ddp, backend=failing, strategy="split")
    assert_trains_as_eager(compiled, ddp, eager, steps=2)
    assert (failing.calls, failing.compiled) == (4, 3)
    (warning,) = warned(caplog)
    assert warning == (
        "ddpopt: the backend fails for segment 1 of 4 (2.weight, 2.bias), which runs uncompiled: "
        "RuntimeError: no such operator"
    )


def test_a_segment_for_which_inductor_fails_runs_uncompiled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_once.cache_clear()
    lowered: list[Any] = []
    lower = GraphLowering.run

    def failing(graph: Any, *inputs: Any) -> Any:
        if not graph.is_backward:
            lowered.append(graph)
        if len(lowered) == 2 and not graph.is_backward:
            raise RuntimeError("no such lowering")
        return lower(graph, *inputs)

    monkeypatch.setattr(GraphLowering, "run", failing)
    ddp, eager = ddp_of(unlike_layers), ddp_of(unlike_layers)
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with uncached, torch._inductor.config.patch(fx_graph_cache=False):
        compiled = ddpopt.compile(ddp, backend="inductor", strategy="split")
        torch.testing.assert_close(step(compiled, ddp, rows()), step(eager, eager, rows()))
    assert len(lowered) == 4
    (warning,) = warned(caplog)
    assert warning.startswith("ddpopt: the backend fails for segment 1 of 4 (2.weight, 2.bias), which runs")
    assert warning.partition("uncompiled: ")[2].startswith("RuntimeError: no such lowering")


def test_without_a_fallback_the_error_names_the_segment() -> None:
    compiled = ddpopt.compile(ddp_of(unlike_layers), backend=FailingOnce(), strategy="split", fallback=None)
    words = r"SegmentError: the backend fails for segment 1 of 4 \(2.weight, 2.bias\): RuntimeError: no such"
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=words):
        compiled(rows())
    with pytest.raises(UsageError, match="fallback: expected 'eager', got 'inline'"):
        ddpopt.compile(ddp_of(), fallback=cast("Any", "inline"))


def test_the_strategy_step_is_no_strategy_for_a_model_and_the_error_says_what_to_call() -> None:
    with pytest.raises(UsageError, match=r"decorate the function that takes it with ddpopt\.train_step$"):
        ddpopt.compile(ddp_of(), strategy=cast("Any", "step"))


def dynamo_state() -> dict[str, Any]:
    """All settings of Dynamo and AOTAutograd, and what else ddpopt might touch."""
    configs = (torch._dynamo.config, torch._functorch.config)
    settings = {f"{c.__name__}.{key}": value for c in configs for key, value in c.get_config_copy().items()}
    return {
        **settings,
        "optimizer": (distributed.DDPOptimizer, dict(vars(DDPOptimizer))),
        "tracing context": torch._guards.TracingContext.try_get(),
        "active module": DistributedDataParallel._active_ddp_module,
        "grad": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "backends": torch.compiler.list_backends(exclude_tags=()),
    }


@every_way
def test_no_global_of_torch_is_changed(way: Wrap) -> None:
    torch._dynamo.reset()
    gc.collect()  # a backend of an earlier test holds its hook for as long as it lives
    before = dynamo_state()
    ddp = ddp_of()
    call = way(ddp, "aot_eager")
    step(call, ddp, rows())
    if way is by_backend:  # a backend that lives may be met again at any time
        del call
        torch._dynamo.reset()
        gc.collect()
    assert dynamo_state() == before


# --------------------------------------------------------------------------------------- usage errors


def refused(inside: Callable[[], nn.Module] = sequential, **arguments: Any) -> str:
    """What is said of arguments; the module is left as it was."""
    ddp = ddp_of(inside)
    before = ddp.reducer, ddp.logger, ddp.module._compiled_call_impl
    told = refusal(lambda: ddpopt.compile(**{"ddp_model": ddp, **arguments}))
    assert (ddp.reducer, ddp.logger, ddp.module._compiled_call_impl) == before
    return told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"ddp_model": nn.Linear(2, 2)},
            "expected a DistributedDataParallel module, got Linear; wrap the model first. "
            'Where a framework wraps it later: model.compile(backend="ddpopt")',
        ),
        ({"strategy": "cut"}, "strategy: expected 'split', 'inline' or 'auto', got 'cut'"),
        ({"backend": 3}, "backend: expected a name or a callable (gm, example_inputs), got 3"),
        ({"buckets": "mine"}, "buckets: expected 'plan', 'ddp', 'open' or 'auto', got 'mine'"),
        (
            {"inside": compiled_in_place, "fullgraph": True},
            "fullgraph: the module inside DDP is already compiled, so graph breaks in it cannot be "
            "rejected here; pass fullgraph=True where it is compiled, or do not compile it",
        ),
    ],
)
def test_an_argument_of_no_use_is_refused(arguments: dict[str, Any], message: str) -> None:
    assert refused(**arguments) == message


@pytest.mark.parametrize("place", ["outside", "in place", "inside a wrapper"])
def test_a_ddp_module_that_is_compiled_is_refused(place: str) -> None:
    ddp: Any = ddp_of()
    if place == "in place":
        ddp.compile(backend="eager")
    else:
        ddp = torch.compile(ddp, backend="eager")
    said = refused(ddp_model=nn.Sequential(ddp) if place == "inside a wrapper" else ddp)
    assert said.startswith("ddp_model: expected a module that is not compiled yet, got ")


@pytest.mark.parametrize("given", [ddpopt.replacing_ddp_optimizer, functools.partial(DdpoptBackend, "eager")])
def test_an_unknown_choice_of_buckets_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^buckets: expected 'plan', 'ddp', 'open' or 'auto', got 'mine'$"):
        contextlib.ExitStack().enter_context(given(buckets="mine"))


def test_an_unknown_backend_is_refused_with_the_names_that_there_are() -> None:
    message = refused(backend="indcutor")
    assert message.startswith("backend: expected the name of a Dynamo backend, got 'indcutor'; known ")
    assert {"inductor", "aot_eager", "eager"} <= set(message.partition("known backends: ")[2].split(", "))


class Peeking(nn.Module):
    """Layers that scale their results by the next one's weight, read without gradient or by another name."""

    def __init__(self, another_name: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.peeked = [each.data if another_name else each for each in [*self.parameters()][::2]]

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            with torch.no_grad():
                scale = self.peeked[(place + 1) % 3].sin()[0]
            x = layer(x).sin() * scale
        return x


def stepping(ddp: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        parameter.data.sub_(gradient, alpha=0.1)
    return averaged(bucket, ddp.process_group)


@pytest.mark.parametrize("strategy", ["inline", "split"])
@pytest.mark.parametrize("another_name", [False, True])
def test_what_a_communication_hook_steps_is_read_as_it_was_before(another_name: bool, strategy: Any) -> None:
    backend = "aot_eager_decomp_partition"  # it recomputes in backward
    found = []
    for compiled in (False, True):
        ddp = ddp_of(lambda: Peeking(another_name), bucket_cap_mb=4 * 8 * 9 / 2**20)
        ddp.register_comm_hook(ddp, stepping)
        call = ddpopt.compile(ddp, backend=backend, strategy=strategy) if compiled else ddp
        for _ in range(3):
            ddp.zero_grad()
            call(torch.ones(2, 8)).sum().backward()
        found.append([parameter.tolist() for parameter in ddp.parameters()])
    assert found[1] == found[0]
