"""How torch's own DDPOptimizer splits a model: its real code, run on fake tensors.

The optimizer gets a backend that compiles nothing, and one step then runs through its stitched module. Each
segment runs as one node of the autograd graph, as with AOTAutograd, so that autograd's engine determines in
which order gradients complete and which segments they wait on. Failures of the optimizer show here; those of
a compiler underneath it do not.

Uses a private name of torch: ``torch._dynamo.backends.distributed.DDPOptimizer``. Calls its
``compile_fn`` and reads its ``buckets`` (in forward order; each with ``params``, ``param_ids`` and
``size``, the bytes that the optimizer counted).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ddpopt.dynamo.hook import DDPOptimizer
from ddpopt.explanation.rehearsal import Rehearsal, RehearsedStep, call
from ddpopt.explanation.result import TorchSegment, TorchSplit
from ddpopt.graph.nodes import example_value, requires_grad

FLOAT_CROSSES = (
    "a float crosses its cuts: backends built on AOTAutograd (inductor, aot_eager) fail "
    "there with \"'float' object has no attribute 'meta'\" (pytorch#196227)"
)
NOTHING_COMPILED = "torch.compile compiles none of it under DDP: Dynamo skips its frames (pytorch#140416)"
UNKNOWN_ORDER = "the order of its gradients is not known: it fails on fake tensors"


def run_torch_split(rehearsal: Rehearsal, cap_bytes: int) -> tuple[TorchSplit, tuple[str, ...]]:
    """Run one step under torch's DDPOptimizer.

    Args:
        rehearsal: the step.
        cap_bytes: ``bucket_bytes_cap`` of the DDP module, the only option that Dynamo gives the optimizer.

    Returns:
        The optimizer's split of the step, without DDP's buckets; and the names of the parameters in ready
        order, empty if that is not known.
    """
    recorder = _Recorder(rehearsal, cap_bytes)
    order: tuple[str, ...] = ()
    notes: list[str] = []
    try:
        order = rehearsal.ready_order(torch.compile(_call_skipped, backend=recorder))
    except Exception as error:  # the optimizer's own failures are caught where it is called
        notes = [f"{UNKNOWN_ORDER} ({type(error).__name__}: {error})"]
    if recorder.failure:
        return TorchSplit(failure=recorder.failure), ()
    if notes:
        segments = tuple(piece.as_segment(index) for index, piece in enumerate(recorder.pieces))
    else:
        segments = _segments_as_run(recorder.runs, rehearsal, order)
        notes = [] if segments else [NOTHING_COMPILED]
        # Dynamo passes a graph's own floats as tensors, so another segment computed this one
        if any(isinstance(value, float) for run in recorder.runs for value in run.inputs):
            notes.append(FLOAT_CROSSES)
    reduced = {spec.name: None for spec in rehearsal.specs.values()}
    times = Counter(name for segment in segments if not segment.reused for name in segment.counted)
    split = TorchSplit(
        segments,
        unseen=tuple(name for name in reduced if name not in times),
        recounted=tuple(name for name, count in times.items() if count > 1),
        alien=tuple(name for name in times if name not in reduced),
        notes=tuple(notes),
    )
    return split, order


def _call_skipped(step: RehearsedStep) -> Any:
    return _call(step)


# Under DDP, Dynamo skips the frames between DDP.forward and the model's own, including this one.
_call = torch._dynamo.disable(call, recursive=False)  # type: ignore[no-untyped-call]  # of torch


@dataclass
class _Run:
    """One execution of a segment."""

    piece: "_Piece"
    inputs: tuple[Any, ...]
    went_back: bool = False


class _Recorder:
    """A Dynamo backend that lets the optimizer cut each graph, and records the result."""

    def __init__(self, rehearsal: Rehearsal, cap_bytes: int) -> None:
        self.runs: list[_Run] = []
        self.pieces: list[_Piece] = []
        self.failure = ""
        self._cap_bytes = cap_bytes
        self._names = {id(param): name for name, param in rehearsal.params.items()}
        self._graphs = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        pieces: list[_Piece] = []

        def compile_nothing(piece: fx.GraphModule, _: Sequence[Any]) -> _Piece:
            pieces.append(_Piece(piece, self._graphs, self.runs))
            return pieces[-1]

        try:
            # not DDPOptimizer(…), which inside replacing_ddp_optimizer() builds ddpopt's own
            optimizer = object.__new__(DDPOptimizer)
            DDPOptimizer.__init__(optimizer, self._cap_bytes, compile_nothing)
            stitched: Callable[..., Any] = optimizer.compile_fn(gm, example_inputs)
        except Exception as error:  # whatever it is, the user would get the same error
            self.failure = self.failure or f"{type(error).__name__}: {error}"
            return gm.forward
        inputs = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
        in_graph = {id(example_value(n)): self._names[id(v)] for n, v in inputs if id(v) in self._names}
        names = self._names | in_graph  # by ``id`` of the parameter, and of its example value
        for piece, bucket in zip(pieces, optimizer.buckets, strict=True):
            labels = zip(bucket.params, bucket.param_ids, strict=True)
            piece.counted = tuple(names.get(key, label) for label, key in labels)
            piece.counted_bytes = bucket.size
        self.pieces += pieces
        self._graphs += 1
        return stitched


class _Piece:
    """Replaces a compiled segment."""

    def __init__(self, gm: fx.GraphModule, graph: int, runs: list[_Run]) -> None:
        self.gm = gm
        self.graph = graph
        self.runs = runs  # of all pieces, in forward order
        self.counted: tuple[str, ...] = ()
        self.counted_bytes = 0
        returned = pytree.tree_leaves(gm.graph.output_node().args[0])
        self.carries_gradient = [
            isinstance(leaf, fx.Node) and requires_grad(example_value(leaf)) for leaf in returned
        ]

    def __call__(self, *inputs: Any) -> Any:
        run = _Run(self, inputs)
        self.runs.append(run)
        with torch.no_grad():
            leaves, structure = pytree.tree_flatten(self.gm(*inputs))
        outputs = _OneNode.apply(run, leaves, *inputs)  # type: ignore[no-untyped-call]  # of torch
        return pytree.tree_unflatten(outputs, structure)

    def as_segment(self, index: int, params: tuple[str, ...] = (), *, reused: bool = False) -> TorchSegment:
        """Describe one run of the piece, or the piece itself if nothing ran."""
        return TorchSegment(index, self.graph, self.counted, self.counted_bytes, params, reused)


class _OneNode(torch.autograd.Function):
    """A whole segment as one node of the autograd graph, with the same edges as AOTAutograd's node."""

    @staticmethod
    def forward(ctx: Any, run: _Run, leaves: Sequence[Any], *inputs: Any) -> tuple[Any, ...]:
        """Make new outputs like `leaves`, so that none is a view of an input."""
        ctx.run = run
        ctx.inputs = inputs
        outputs = tuple(torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        carried = zip(outputs, run.piece.carries_gradient, strict=True)
        constant = [output for output, carries in carried if isinstance(output, Tensor) and not carries]
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        """Record that the segment's backward runs, and give each input a gradient."""
        ctx.run.went_back = True
        trained = (isinstance(value, Tensor) and value.requires_grad for value in ctx.inputs)
        pairs = zip(ctx.inputs, trained, strict=True)
        return (None, None, *(torch.empty_like(value) if is_trained else None for value, is_trained in pairs))


def _segments_as_run(
    runs: Sequence[_Run], rehearsal: Rehearsal, order: Sequence[str]
) -> tuple[TorchSegment, ...]:
    """The segments, each with the gradients that its backward completes.

    Backward runs segments last to first, so a gradient is complete after the first segment that reads it.
    """
    ready = frozenset(order)
    completed: set[str] = set()
    seen: set[int] = set()
    segments: list[TorchSegment] = []
    for index, run in enumerate(runs):
        specs = [rehearsal.specs[id(value)] for value in run.inputs if id(value) in rehearsal.specs]
        names = dict.fromkeys(spec.name for spec in specs) if run.went_back else {}
        params = tuple(name for name in names if name in ready and name not in completed)
        completed.update(params)
        segments.append(run.piece.as_segment(index, params, reused=id(run.piece) in seen))
        seen.add(id(run.piece))
    return tuple(segments)
