"""Plan a model without running it: trace it with Dynamo on fake tensors and plan its graphs.

Invariant: needs no process group and no accelerator, copies no weights, and leaves the caller's model and
torch's global state unchanged.
"""

import copy
import copyreg
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode, log
from torch.autograd.graph import get_gradient_edge
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ddpopt.ddp.specs import limits_of, specs_from_ddp, specs_from_module
from ddpopt.dynamo.model_graphs import STRATEGIES, ModelGraphs
from ddpopt.errors import UsageError, require_choice
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.join import join_plans
from ddpopt.planning.limits import DDP_ARGUMENTS, BucketConfig
from ddpopt.planning.plan import Plan, Strategy
from ddpopt.strategies.protocol import Captured, Planned


@dataclass(frozen=True)
class Capture:
    """A model's graphs, as compilation would see them, and the parameters that DDP would reduce.

    Attributes:
        specs: every parameter that DDP reduces, in the order of the reducer's list.
        config: DDP's bucket limits.
        graphs: each graph with its facts and its own plan, in forward order; a parameter belongs to the first
            graph that reads it, because its gradient is complete only there.
        planned: indices of the graphs in the plan: those that complete a gradient or show earlier reads.
        plan: the plan that ddpopt follows; it numbers the graphs that it covers, in forward order.
    """

    specs: tuple[ParamSpec, ...]
    config: BucketConfig
    graphs: tuple[Planned, ...]
    planned: tuple[int, ...]
    plan: Plan


def plan(model: nn.Module, *inputs: Any, strategy: Strategy = "auto", **kwargs: Any) -> Plan:
    """Plan a model's buckets, segments and cuts, as `ddpopt.compile` with the same strategy will use them.

    This holds for ``buckets="plan"``, a forward that begins with gradients, and modes without CUDA graphs.

    Args:
        model: a module, or a DDP module, whose own bucket options then apply. Parameters may be real, fake
            or on the meta device.
        inputs: the positional arguments of its forward.
        strategy: as for `ddpopt.compile`.
        kwargs: DDP's own arguments (``bucket_cap_mb=25``, ``bucket_cap_mb_list``,
            ``find_unused_parameters``, ``static_graph``, …); everything else goes to the model's forward.

    Returns:
        The plan, equal on every rank and in every process for equal arguments.

    Raises:
        UsageError: an argument cannot be used, or the model cannot be traced.
    """
    return capture(model, *inputs, strategy=strategy, **kwargs).plan


@torch.inference_mode(mode=False)
@torch.enable_grad()  # a plan is always for training
def capture(model: nn.Module, *inputs: Any, strategy: Strategy = "auto", **kwargs: Any) -> Capture:
    """Trace `model` on fake tensors; arguments as for `plan`."""
    require_choice("strategy", strategy, Strategy)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: expected a torch.nn.Module, got {model!r}")
    ddp_kwargs = {key: kwargs.pop(key) for key in DDP_ARGUMENTS if key in kwargs}
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        config = BucketConfig.from_kwargs(**ddp_kwargs)
        specs = specs_from_module(model)
    elif ddp_kwargs:
        raise UsageError(
            f"do not pass {', '.join(map(repr, sorted(ddp_kwargs)))} with a DDP module; it already has its "
            "options. Leave them out, or pass the module inside (ddp.module)"
        )
    else:
        config = limits_of(model)
        specs = specs_from_ddp(model)
        model = model.module
    mode, fakes, copies = fake_copy(model, inputs, kwargs)
    known = ModelGraphs({id(copies[spec.name]): spec for spec in specs}, config)
    graphs = _traced(mode, fakes, known, strategy)
    planned = tuple(index for index, graph in enumerate(graphs) if graph.graph_plan in known.relevant())
    plan = known.joined() or join_plans((), specs, config)
    return Capture(specs, config, graphs, planned, plan)


def _traced(mode: FakeTensorMode, fakes: Any, known: ModelGraphs, strategy: Strategy) -> tuple[Planned, ...]:
    """The graphs of a model that `fake_copy` made, with its arguments; they are added to the `known` ones."""
    model, inputs, kwargs = fakes
    graphs: list[Planned] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., Any]:
        planned = known.add(Captured.of(gm, example_inputs, known.specs), STRATEGIES[strategy])
        graphs.append(planned)
        return known.with_read_tracking(planned, gm.forward)

    def traced(*args: Any, **kwargs: Any) -> Any:  # our own frame: Dynamo skips torch.nn's modules
        return model(*args, **kwargs)

    step = torch.compile(traced, backend=backend, **_isolated())  # type: ignore[call-overload]
    # torch logs the stack of an error that we name
    with mode, private_dynamo(), patch.object(log, "disabled", True):
        try:
            step(*inputs, **kwargs)
        except Exception as error:
            raise UsageError(
                f"model: {type(model).__name__} could not be traced on fake tensors: "
                f"{_untraceable(model, (inputs, kwargs), error)}\n"
                "Check that model(*inputs) runs in eager."
            ) from error
    return tuple(graphs)


def _untraceable(model: nn.Module, call: object, error: BaseException) -> str:
    """The error that Dynamo's own wraps, and what the forward takes and got."""
    root: Any = error
    # one of its classes, or since torch 2.15 a RuntimeError that says so
    while "dynamo" in f"{type(root)} {root}".lower() and (root.__cause__ or root.__context__):
        root = root.__cause__ or root.__context__
    takes, got = (shorten(str(each), 400) for each in (inspect.signature(model.forward), call))
    said = str(root).partition("\n\n")[0]
    got = got.replace("FakeTensor(..., ", "Tensor(")
    return f"{type(root).__name__}: {said}\nIts forward takes {takes}, and got {got}."


def fake_copy(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[FakeTensorMode, Any, dict[str, torch.Tensor]]:
    """Copy a model and the arguments of its forward, replacing tensors by fake ones; aliases stay aliases.

    Returns:
        The fake mode (that of the model's parameters if they are fake), the copies, and each parameter's copy
        by all of its names.
    """
    # a compiled module is traced as its original; the parameter names stay those of the compiled one
    inner = getattr(model, "_orig_mod", model)
    fakes = (tensor.fake_mode for tensor in inner.parameters() if isinstance(tensor, FakeTensor))
    mode = next(fakes, None) or FakeTensorMode(shape_env=ShapeEnv())  # nested tensors have symbolic sizes
    memo: dict[int, Any] = {}
    for tensor in (*inner.parameters(), *inner.buffers(), *pytree.tree_leaves((inputs, kwargs))):
        if isinstance(tensor, torch.Tensor):
            memo.setdefault(id(tensor), _fake(mode, tensor))
    # autograd nodes that a model holds, to keep hooks on them alive, are shared: they cannot be copied
    node = get_gradient_edge(torch.empty(0, requires_grad=True, device="cpu")).node  # torch exports no class
    with FakeCopyMode(mode), patch.dict(copyreg.dispatch_table, {type(node): str}):
        try:
            copied = copy.deepcopy((inner, inputs, dict(kwargs)), memo)
        except TypeError as error:
            raise UsageError(
                f"model: {type(inner).__name__} could not be copied: {error}\n"
                "Give the object that cannot be copied a __deepcopy__, or attach it after planning."
            ) from error
    return mode, copied, {n: memo[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.device.type != "meta":
        return mode.from_tensor(tensor, static_shapes=True)
    # a meta model runs like a CPU model: its forward may create tensors on the default device
    with mode:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _isolated() -> dict[str, bool]:
    """Options that keep these graphs out of the caller's recompile limit, if torch supports it (2.13)."""
    name = "isolate_recompiles"
    return {name: True} if name in inspect.signature(torch.compile).parameters else {}


def private_dynamo() -> Any:
    """A context whose traces are independent of the limits and settings of the caller's compilations."""
    patch_settings: Any = torch._dynamo.config.patch
    return patch_settings(optimize_ddp=False, recompile_limit=2**16, accumulated_recompile_limit=2**16)
