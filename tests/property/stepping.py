"""Drawn models trained under DDP in this process alone, eager and compiled, and what must be equal of them.

Compiled code may differ from eager in two ways that are known, and only there is less asked of it. Where
torch's own ``aot_eager``, without ddpopt, differs from eager, ddpopt has to be equal to that. And where a cut
may change the order in which a gradient is summed, gradients have to pass the judge's bound of rounding.
Both are reported as events, and named in the message of a failure.

Invariant: whatever differs is compared with something; nothing is left out.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import currently_in_test_context, event
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import ddpopt
from ddpopt.cases.case import step_seed
from ddpopt.fuzz.examine import forget_failures
from ddpopt.graph.nodes import example_value, storages
from ddpopt.judge.judging.arithmetic import arithmetic, arithmetic_of
from ddpopt.judge.judging.rounding import SAMPLES, neighbour, perturbed_state
from ddpopt.planning.capture import capture
from ddpopt.planning.plan import Plan
from ddpopt.testing.drawn import DrawnModel

MARKS = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning"),
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides:UserWarning"),
    # torch.cond runs through Dynamo in eager, which looks at the gradient of what it is given
    pytest.mark.filterwarnings("ignore:.*is not a leaf Tensor is being accessed:UserWarning"),
]
"""Of tests that train under DDP: what torch warns of is not what they are about."""
Wrap = Callable[[DistributedDataParallel], Any]
Seen = dict[str, Any]
Strategy = Literal["split", "inline"]
STRATEGIES: tuple[Strategy, ...] = ("split", "inline")
COMMUTED = 2
"""So many terms have one sum, whichever comes first."""
SEVERAL = ("cosine_similarity", "gru_cell", "multi_head_attention_forward", "normalize", "rms_norm")
"""Functions that read an argument several times."""
SPREADING = ("broadcast_to", "einsum", "expand", "expand_as", "mean", "sum")
"""Functions whose gradients come laid out in another way than what they are the gradients of."""


def eager(ddp: DistributedDataParallel) -> Any:
    return ddp


def plain(ddp: DistributedDataParallel) -> Any:
    """What torch makes of it by itself."""
    with torch._dynamo.config.patch(optimize_ddp=False):
        compiled = torch.compile(ddp, backend="aot_eager")

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(optimize_ddp=False):
            return compiled(*args, **kwargs)

    return call


def compiled(strategy: Strategy) -> Wrap:
    def wrap(ddp: DistributedDataParallel) -> Any:
        return ddpopt.compile(ddp, backend="aot_eager", strategy=strategy)

    wrap.__name__ = f"ddpopt, {strategy}"
    return wrap


class Run:
    """A drawn model under DDP.

    Attributes:
        wrap: eager, or what compiles it.
        model: the module itself.
        loss: of a forward whose backward is still to come.
        seen: what the last forward returned.
        nudge: another number has parameters, buffers and inputs replaced by other neighbouring numbers.
    """

    def __init__(
        self,
        drawn: DrawnModel,
        wrap: Wrap,
        group: ProcessGroup | None = None,
        nudge: int = 0,
        **options: bool,
    ) -> None:
        self.wrap = wrap
        self._options = options
        self.group = group or dist.group.WORLD
        self._program = drawn.program
        self.nudge = nudge
        self.model = self._program.model()
        if nudge:
            state = dict((*self.model.named_parameters(), *self.model.named_buffers()))
            for name, moved in perturbed_state(state, nudge, None).items():
                state[name].data = moved.detach()
        self.loss: Tensor | None = None
        self.seen: Seen = {}
        self.rewrap()

    def rewrap(self) -> None:
        """Wrap the module anew, as after a change of what is trained."""
        self.ddp = DistributedDataParallel(
            self.model, process_group=self.group, **self._program.module.DDP_KWARGS | self._options
        )
        self._call = self.wrap(self.ddp)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.SGD(trained, 0.05, momentum=0.5)

    def forward(self, step: int) -> None:
        args, kwargs = self._program.inputs(rank := dist.get_rank(), step)
        if self.nudge:
            generator = torch.Generator().manual_seed((self.nudge * 64 + rank) * 64 + step)
            args, kwargs = pytree.tree_map(lambda leaf: neighbour(leaf, generator, data=True), (args, kwargs))
        torch.manual_seed(step_seed(rank, step))
        output = self._call(*args, **kwargs)
        self.loss = self._program.loss(output)
        leaves = pytree.tree_leaves((output, args, kwargs))
        self.seen = {f"value {place}": copied(leaf) for place, leaf in enumerate(leaves)}
        self.seen["generator"] = torch.random.get_rng_state()

    def backward(self) -> None:
        assert self.loss is not None
        if self.loss.requires_grad:
            self.loss.backward()  # type: ignore[no-untyped-call]  # of torch
        self.seen["generator after backward"] = torch.random.get_rng_state()
        self.loss = None

    def state(self) -> Seen:
        """All that two runs of one model must agree on."""
        params = dict(self.model.named_parameters())
        return {
            **self.seen,
            **{f"gradient of {name}": copied(param.grad) for name, param in params.items()},
            **{f"parameter {name}": copied(param) for name, param in params.items()},
            **{f"buffer {name}": copied(buffer) for name, buffer in self.model.named_buffers()},
        }


def copied(value: object) -> object:
    if not isinstance(value, Tensor):
        return value if isinstance(value, (int, float, bool, str, type(None))) else str(type(value))
    dense = value.detach().to_dense() if value.is_sparse else value.detach()
    return dense.resolve_conj().clone()


def differing(first: Seen, second: Seen) -> list[str]:
    """The names of what two runs do not have in common, bit by bit."""
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not same(value, second[name])]


def same(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        alike = (first.shape, first.dtype) == (second.shape, second.dtype)
        return alike and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
    return type(first) is type(second) and first == second


def is_rounding(got: object, samples: list[object]) -> bool:
    """Whether a value differs from others, of runs on neighbouring data, by no more than rounding does."""
    tensors = [sample for sample in samples if isinstance(sample, Tensor)]
    if not isinstance(got, Tensor) or len(tensors) < len(samples) or got.shape != tensors[0].shape:
        return False
    return arithmetic(got, arithmetic_of(tensors, None)).right


def follows_gradients(step: int, name: str) -> bool:
    """Whether a value comes of gradients: those do themselves, and whatever is computed after an update."""
    return step > 0 or name.startswith(("gradient of ", "parameter "))


def trained(
    drawn: DrawnModel, wrap: Wrap, steps: int = 2, group: ProcessGroup | None = None, nudge: int = 0
) -> list[Seen]:
    """What some steps of training leave behind, step by step."""
    torch._dynamo.reset()
    run, found = Run(drawn, wrap, group, nudge), []
    for step in range(steps):
        run.optimizer.zero_grad()
        run.forward(step)
        run.backward()
        run.optimizer.step()
        found.append(run.state())
    return found


def assert_equal_steps(
    drawn: DrawnModel, wrap: Wrap, expected: list[Seen], group: ProcessGroup | None = None
) -> None:
    """Train and compare with eager, or else with what is known to differ from it."""
    found = trained(drawn, wrap, group=group)
    wrong = _differing_steps(found, expected)
    if not somewhere(bool(wrong), group):
        return
    by_torch = trained(drawn, plain, group=group)
    torchs = _differing_steps(by_torch, expected)
    left = [each for each in wrong if each in _differing_steps(found, by_torch)]
    several = dist.get_world_size(group) > 2  # three terms have several orders
    if somewhere(bool(left) and (several or resummed(drawn)), group):
        tell("a cut, or the form of a bucket, changes the order of a sum")
        samples = [by_torch, *(trained(drawn, plain, 2, group, nudge) for nudge in range(1, SAMPLES))]
        left = [
            (step, name)
            for step, name in left
            if not follows_gradients(step, name)
            or not is_rounding(found[step][name], [sample[step][name] for sample in samples])
        ]
    elif torchs:
        tell("plain aot_eager differs from eager")
    assert not left, (
        f"{getattr(wrap, '__name__', wrap)}: expected what eager DDP leaves behind, but (step, value) {left} "
        f"differ. Plain torch.compile(backend='aot_eager') of the undivided model differs in {torchs}"
    )


@contextlib.contextmanager
def where_torch_compiles(drawn: DrawnModel) -> Iterator[None]:
    """Let an exception pass, and count it, where torch alone cannot compile a model in one piece either.

    What a test asserts is none: that always counts.
    """
    try:
        yield
    except Exception as error:
        forget_failures()
        if _is_asserted(error) or _compiles(drawn):
            raise
        event("torch alone cannot compile it")


def _is_asserted(error: Exception) -> bool:
    *_, raised_in = traceback.walk_tb(error.__traceback__)
    return Path(raised_in[0].f_code.co_filename).parent == Path(__file__).parent


def _compiles(drawn: DrawnModel) -> bool:
    trained(drawn, eager)  # where that fails now, something is left behind that is no fault of torch's
    try:
        trained(drawn, plain)
    except Exception:  # whatever Dynamo or AOTAutograd raises of it
        return False
    return True


def resummed(drawn: DrawnModel) -> bool:
    """Whether a cut may change the order of a sum: where three reads are divided, or layouts change."""
    program = drawn.program
    args, kwargs = program.inputs(dist.get_rank(), 0)
    traced = capture(program.model(), *args, strategy="split", **kwargs, **program.module.DDP_KWARGS)
    planned = enumerate(traced.graphs[index].gm.graph for index in traced.planned)
    return any(_divides(graph, traced.plan(), place) for place, graph in planned)


def _divides(graph: fx.Graph, plan: Plan, place: int) -> bool:
    home = {name: s.index for s in plan.segments if s.graph == place for name in s.nodes}
    reads: dict[object, list[int]] = {}
    for node in graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        value = example_value(node)
        if name in SPREADING or (isinstance(value, Tensor) and not value.is_contiguous()):
            return True
        times = 2 if name in SEVERAL or isinstance(node.target, HigherOrderOperator) else 1
        # who reads a view reads what it shows
        shown = {storage for source in node.all_input_nodes for storage in storages(source)}
        for storage in shown.difference(storages(node)):
            reads.setdefault(storage, []).extend([home.get(node.name, -1)] * times)
    return any(len(segments) > COMMUTED and len(set(segments)) > 1 for segments in reads.values())


def tell(what: str) -> None:
    """Have Hypothesis count an event where it draws: not in tests of one model."""
    if currently_in_test_context():
        event(what)


def somewhere(flag: bool, group: ProcessGroup | None) -> bool:
    """Whether `flag` holds on a rank of the group: what has collectives is then done by all, or by none."""
    count = torch.tensor(int(flag))
    dist.all_reduce(count, group=group)
    return bool(count)


def _differing_steps(first: list[Seen], second: list[Seen]) -> list[tuple[int, str]]:
    pairs = zip(first, second, strict=True)
    return [(step, name) for step, pair in enumerate(pairs) for name in differing(*pair)]


def trainable(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if param.requires_grad]
