"""Strategy inline at compile time: what becomes of a graph, and which graphs are split instead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import ddpopt
from ddpopt.errors import HandOverError
from ddpopt.inline.compile import together
from ddpopt.inline.handover import COPIED
from ddpopt.inline.owners import _owners_of_one
from ddpopt.inline.why_not import why_not_inline
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.facts import GraphFacts, ParamUse
from ddpopt.planning.plan import Bucket, Strategy
from tests.support.models import gradients_of, same
from tests.support.rehearsing import Linears
from tests.support.tracing import Recorder, written

pytestmark = pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")

HAND_OVER = torch.ops.ddpopt.hand_over.default
CAP_MB = 4 * 8 * 8 / 2**20
"""One weight a bucket."""


class Two(Linears):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(8, 2)


@dataclass
class Compiler(Recorder):
    """AOTAutograd; notes the backward graphs too."""

    backwards: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        super().__call__(gm, example_inputs)
        as_it_is = partial(aot_autograd, fw_compiler=lambda graph, _: make_boxed_func(graph.forward))
        return as_it_is(bw_compiler=self._noted)(gm, example_inputs)

    def _noted(self, graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        self.backwards.append(graph)
        return make_boxed_func(graph.forward)


def train(model: nn.Module, backend: Any, strategy: Any = "inline", **options: Any) -> nn.Module:
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
    torch.autograd.backward(ddpopt.compile(ddp, backend=backend, strategy=strategy, **options)(rows()).sum())
    return model


def rows() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------------------ the graphs


def test_the_backward_graph_hands_a_buckets_gradients_over_where_the_last_completes() -> None:
    compiler = Compiler()
    train(Two(), compiler)
    (graph,) = compiler.backwards
    lines = written(graph)
    assert lines[lines.index("hand_over(view, t_5)") - 1] == "t_5(t_4)"
    assert lines[-3:-1] == ["t_8(t_7)", "hand_over_1(view_1, t_8)"]


def grouped(*uses: tuple[str, int, dict[str, Any]], buckets: Sequence[str]) -> str:
    """How parameters go together, each given by its name, where it completes, and what is special about it.

    A bucket is a word of which each letter is a parameter.
    """
    graph = fx.Graph()
    nodes = {graph.placeholder(name): {name: name} for name, _, _ in uses}
    usual = {"nbytes": 4, "dtype": "f", "device": "cpu"}
    specs = {name: ParamSpec(name, **{**usual, **special}) for name, _, special in uses}
    facts = GraphFacts((), tuple(ParamUse(specs[name], (at,)) for name, at, _ in uses), (), nodes)
    decided = [Bucket(index, tuple(word), 4, "f", "cpu", 0, "") for index, word in enumerate(buckets)]
    groups = together([*nodes], facts, decided)
    return " ".join("".join(node.name for node in group) for group in groups)


def test_sparse_gradients_and_those_of_another_device_are_handed_over_apart() -> None:
    dense: dict[str, Any] = {}
    sparse, far = {"sparse": True}, {"device": "cuda:0"}
    assert grouped(("c", 0, dense), ("b", 1, sparse), ("a", 2, dense), buckets=["b", "ac"]) == "a b c"
    assert grouped(("c", 0, dense), ("b", 1, far), ("a", 2, far), buckets=["ab", "c"]) == "ab c"
    assert grouped(("c", 0, far), ("b", 1, dense), ("a", 2, far), buckets=["b", "ac"]) == "a b c"


# ------------------------------------------------------------------------------- which graphs are split


class Writes(Two):
    """Writes to a parameter that its graph reads."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[0].get_parameter("weight").mul_(0.5)
        return super().forward(x)


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]  # torch's own
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sum()


class Unseen(Two):
    """Dynamo does not look into a function that reads a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(scaled(x, self.layers[0].get_parameter("weight")))


def test_auto_compiles_one_graph_inline_and_inline_a_single_bucket_whole() -> None:
    rows_of: list[tuple[float, Strategy, int]] = [(CAP_MB, "auto", 2), (25, "inline", 0)]
    for cap_mb, strategy, calls in rows_of:
        torch._dynamo.reset()
        compiler = Compiler()
        ddp = DistributedDataParallel(Two(), bucket_cap_mb=cap_mb)
        torch.autograd.backward(ddpopt.compile(ddp, backend=compiler, strategy=strategy)(rows()).sum())
        (backward,) = compiler.backwards
        assert len(backward.graph.find_nodes(op="call_function", target=HAND_OVER)) == calls
        assert compiler.calls == 1


Said = Callable[[], list[str]]
WHY = {Writes: "is written to in the graph", Unseen: "may be written to by 'scaled'"}
SPLIT = "ddpopt: a graph is split and not compiled inline:"


@pytest.mark.parametrize("strategy", ["inline", "auto"])
@pytest.mark.parametrize("factory", WHY)
def test_a_graph_that_may_write_a_parameter_is_split(strategy: str, factory: type[Two], said: Said) -> None:
    compiler, eager = Compiler(), factory()
    model = train(factory(), compiler, strategy)
    torch.autograd.backward(DistributedDataParallel(eager)(rows()).sum())
    assert same([gradients_of(model)], [gradients_of(eager)])
    assert len(compiler.graphs) == 2
    level = "WARNING" if strategy == "inline" else "INFO"
    assert said()[0] == f"{level}: {SPLIT} parameter 'layers.0.weight' {WHY[factory]}"


def test_code_for_cuda_graphs_is_split_and_says_why(said: Said) -> None:
    graphs: list[fx.GraphModule] = []

    def cudagraphs(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    train(Two(), cudagraphs)
    assert len(graphs) == 2
    assert said()[0] == f"WARNING: {SPLIT} CUDA graphs replay a backward without Python"


# ------------------------------------------------------------------------------ the memory of gradients


class Sums(nn.Module):
    """Two biases whose gradients are one tensor, that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one + self.two


class SumsOfViews(Sums):
    """The gradients are views of the output's, made in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.one.view(-1) + self.two.view(-1)).view(4, 8)


@pytest.mark.parametrize("kind", [Sums, SumsOfViews])
def test_no_two_gradients_share_memory_and_none_the_callers(kind: type[Sums]) -> None:
    model = kind()
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MB / 2)
    out = ddpopt.compile(ddp, backend="aot_eager", strategy="inline")(rows())
    out.retain_grad()
    given = torch.ones_like(out)
    out.backward(given)
    tensors = [given, out.grad, *(p.grad for p in model.parameters())]
    own = {t.untyped_storage().data_ptr() for t in tensors[2:]}
    assert len(own) == 2
    assert own.isdisjoint(t.untyped_storage().data_ptr() for t in tensors[:2])


def test_several_backwards_at_once_give_eagers_gradients() -> None:
    def batched(call: Any, model: nn.Module) -> tuple[Tensor, ...]:
        out = call(rows())
        directions = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(2))
        return torch.autograd.grad(out, [*model.parameters()], directions, is_grads_batched=True)

    model, eager = Two(), Two()
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
    found = batched(ddpopt.compile(ddp, backend="aot_eager", strategy="inline"), model)
    for a, b in zip(found, batched(eager, eager), strict=True):
        torch.testing.assert_close(a, b)


def test_who_owns_a_tensor_is_measured_without_the_modes_that_are_active() -> None:
    outside = [_owners_of_one(False), _owners_of_one(True)]
    _owners_of_one.cache_clear()
    with ddpopt.observe(DistributedDataParallel(Two())):
        inside = [_owners_of_one(False), _owners_of_one(True)]
    assert inside == outside
    assert outside[0] != outside[1]
    for elsewhere in (torch.inference_mode, torch._C._AutoDispatchBelowADInplaceOrView):
        _owners_of_one.cache_clear()
        with elsewhere():
            assert [_owners_of_one(False), _owners_of_one(True)] == outside


def test_a_gradient_outside_of_any_backward_is_refused() -> None:
    with pytest.raises(HandOverError, match="input 3 of a compiled graph has a gradient, but no backward"):
        HAND_OVER([torch.ones(2)], [3], [COPIED])


@pytest.mark.parametrize(
    ("op", "value", "lent", "reason"),
    [
        ("get_attr", torch.ones(2), True, "parameter 'w' is not an input of the graph but an attribute"),
        (
            "placeholder",
            torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            True,
            "parameter 'w' is a NestedTensor, a tensor subclass that wraps other tensors",
        ),
        (
            "placeholder",
            TwoTensor(torch.ones(2), torch.ones(2)),  # type: ignore[no-untyped-call]  # of torch
            False,
            "'w' is a TwoTensor, a tensor subclass that wraps other tensors",
        ),
        ("placeholder", torch.ones(2), False, None),
    ],
)
def test_a_parameter_not_lent_is_named(op: str, value: Tensor, lent: bool, reason: str | None) -> None:
    graph = fx.Graph()
    node = graph.create_node(op, "w")
    node.meta["example_value"] = value
    graph.output(node)
    gm = fx.GraphModule({"w": value}, graph)
    assert why_not_inline(gm, {node: {"w": "w"}} if lent else {}) == reason


def test_a_graph_whose_backward_communicates_is_split() -> None:
    collective = torch.ops._c10d_functional.all_reduce
    reason = "the backward of 'sums' communicates, and all ranks must send in the same order"
    for trained, told in ((True, reason), (False, None)):
        graph = fx.Graph()
        given = graph.placeholder("x")
        sums = graph.create_node("call_function", collective, (given, "sum", "0"), name="sums")
        for node in (given, sums):
            node.meta["example_value"] = torch.ones(2, requires_grad=trained)
        graph.output(sums)
        assert why_not_inline(fx.GraphModule({}, graph), {}) == told
