"""Parts of a step that are kept out of its graph, and the user's own pass over the graph.

A part that cannot be captured is replaced by another module, whose operators the graph only calls; `opaque`
makes one of any module.

Invariant: a pass changes how a step is computed, never what it takes and returns, nor what is sent.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from ddpopt.errors import UsageError

Transform = Callable[[fx.GraphModule], fx.GraphModule | None]
OF_STATE = "ddpopt_state"
"""In a node's meta: whether it is an input that a pass added."""


class Override:
    """What a step does with some submodules; inherit from it."""

    def replacement(self, name: str, module: nn.Module) -> nn.Module:
        """Choose the module to use instead of a submodule while a step is captured.

        Args:
            name: as in ``named_modules()`` of the module inside DDP.
            module: the submodule.

        Returns:
            The submodule itself, or another module, which uses the submodule's parameters.
        """
        return module

    def transform(self, graph_module: fx.GraphModule, state: Mapping[str, Tensor]) -> fx.GraphModule | None:
        """Change the captured graph, before collectives are put into it.

        Args:
            graph_module: the graph, in which ``ddpopt::average`` marks each gradient that will be averaged.
            state: the user's tensors, by the names of the graph's placeholders.

        Returns:
            The graph to use; None for `graph_module` itself.
        """
        return graph_module


class opaque(nn.Module):
    """Computes the same as a module, but is a single operator in the graph of a step.

    Its backward runs the module once more. The module takes tensors and returns one; it draws no random
    numbers, changes no buffers, and runs without autocast.

    Args:
        module: the module; its code may be anything that runs in eager.
        like: returns an empty tensor of the form of the module's output, given the inputs; by default of the
            form of the first one.
    """

    def __init__(
        self, module: nn.Module, like: Callable[..., Tensor] = lambda *inputs: torch.empty_like(inputs[0])
    ) -> None:
        super().__init__()
        self.handle = next(_handles)
        _opaque[self.handle] = self
        self.like: Callable[..., Tensor] = like
        self.held = (module,)  # in a tuple, as its parameters are not this module's
        self.names: list[str] = [name for name, _ in module.named_parameters()]

    def forward(self, *inputs: Tensor) -> Any:
        """Call the operator with parameters and inputs."""
        return torch.ops.ddpopt.opaque(self.handle, [*self.held[0].parameters(), *inputs])

    def run(self, tensors: Sequence[Tensor]) -> Tensor:
        """Call the module with parameters and inputs."""
        parameters = dict(zip(self.names, tensors, strict=False))
        result: Tensor = functional_call(self.held[0], parameters, (*tensors[len(self.names) :],))
        return result


_handles = itertools.count()
_opaque: "WeakValueDictionary[int, opaque]" = WeakValueDictionary()
"""Opaque modules by their handle, the first argument of the operator."""


@torch.library.custom_op("ddpopt::opaque", mutates_args=())
def _run(handle: int, tensors: Sequence[Tensor]) -> Tensor:
    return _opaque[handle].run(tensors)


@torch.library.custom_op("ddpopt::opaque_backward", mutates_args=())
def _run_backward(handle: int, gradient: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    # autograd records nothing inside an operator, but it does on another thread
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_gradients, handle, gradient, tensors).result()


def _gradients(handle: int, gradient: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in tensors]
    output = _opaque[handle].run(leaves)
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(output, trained, gradient, allow_unused=True, materialize_grads=True))
    return [next(found) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves]


def _save(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001  # torch passes it
    ctx.handle = inputs[0]
    ctx.save_for_backward(*inputs[1])


def _backward(ctx: Any, gradient: Tensor) -> Any:
    found = torch.ops.ddpopt.opaque_backward(ctx.handle, gradient, [*ctx.saved_tensors])
    return None, [each if each.is_floating_point() else None for each in found]


_run.register_fake(lambda handle, tensors: _opaque[handle].like(*tensors[len(_opaque[handle].names) :]))
_run_backward.register_fake(lambda _, __, tensors: [torch.empty_like(each) for each in tensors])
_run.register_autograd(_backward, setup_context=_save)


@dataclass
class Swap:
    """A place of a submodule, and the module to put there."""

    held: Any
    key: str
    other: nn.Module


@contextlib.contextmanager
def swapped(swaps: Sequence[Swap]) -> Iterator[None]:
    """In this block the other modules are in their places; a nested block puts the original ones back."""
    _exchange(swaps)
    try:
        yield
    finally:
        _exchange(swaps)


def _exchange(swaps: Sequence[Swap]) -> None:
    for swap in swaps:
        swap.held[swap.key], swap.other = swap.other, swap.held[swap.key]


def replacements(root: nn.Module, overrides: Sequence[Override]) -> Iterator[Swap]:
    """The submodules to replace."""
    for name, module in [*root.named_modules()]:
        for key, child in [(key, each) for key, each in module._modules.items() if each is not None]:
            path = f"{name}.{key}" if name else key
            made = child
            for override in overrides:
                made = override.replacement(path, made)
            if made is not child:
                yield Swap(module._modules, key, made)


def passed(change: Callable[..., Any], gm: fx.GraphModule, what: str, *given: Any) -> fx.GraphModule:
    """Run a pass over a graph, and check what it did.

    Args:
        change: the pass; it may change the graph, or return another one.
        gm: the graph.
        what: the name of the pass, for the error.
        given: what the pass gets in addition to the graph.

    Returns:
        The graph to use.

    Raises:
        UsageError: the graph that it leaves is broken, or has other inputs, outputs or collectives.
    """
    before = _face(gm)
    found = change(gm, *given)
    changed = gm if found is None else found
    if not isinstance(changed, fx.GraphModule):
        raise UsageError(f"{what}: expected a GraphModule or None, got {changed!r}")
    try:
        changed.graph.lint()
    except Exception as error:
        raise UsageError(f"{what} leaves a broken graph: {error}") from error
    changed.recompile()
    for was, now in zip(before, _face(changed), strict=True):
        if was != now:
            raise UsageError(f"{what} changes inputs, outputs or collectives: expected {was}, got {now}")
    return changed


def _face(gm: fx.GraphModule) -> tuple[Any, ...]:
    """A graph's inputs, the number of its outputs, and its collectives."""
    inputs = [node.name for node in gm.graph.find_nodes(op="placeholder") if not node.meta.get(OF_STATE)]
    outputs: Any = gm.graph.output_node().args[0]
    named = (str(node.target) for node in gm.graph.nodes if node.op == "call_function")
    sent = sorted(name for name in named if name.startswith(("_c10d_functional", "ddpopt.average")))
    return inputs, len(outputs), sent
