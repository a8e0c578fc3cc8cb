"""Programs cut by hand: rows of calls, and the pieces that a partitioner would make of them.

The certificate must not be tested with the partitioner that it judges. So a program is written down twice
here, as one list of rows and as pieces with inputs and outputs, and graphs are built of both. A mutant edits
the pieces, or the plan, before that.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ddpopt.planning.plan import Plan

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


@dataclass(frozen=True)
class Ref:
    """A value, by name."""

    name: str


@dataclass(frozen=True)
class Row:
    """One node: what it calls, on which values."""

    name: str
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    op: str = ""
    meta: Mapping[str, Any] | None = None
    """Metadata of its own, in place of what the name stands for."""

    @property
    def kind(self) -> str:
        return self.op or ("call_method" if isinstance(self.target, str) else "call_function")


@dataclass
class Piece:
    """One segment: what it is called with (top names by its own), what it does, what it hands out."""

    inputs: dict[str, Any]
    rows: list[Row]
    outputs: dict[str, Any]
    before: list[Row] = field(default_factory=list)
    """Rows of the stitched graph itself, in front of the call."""
    after: list[Row] = field(default_factory=list)


@dataclass
class Story:
    """A program, its pieces, its plan, and all that a mutant may edit."""

    inputs: list[Row]
    rows: list[Row]
    output: Any
    pieces: list[Piece]
    result: Any
    plan: Plan
    names: dict[str, str]
    meta: dict[str, dict[str, Any]]
    held: dict[str, Any] = field(default_factory=dict)
    other_held: list[dict[str, Any]] = field(default_factory=list)
    """For each piece, attributes in place of those of the original."""
    top_inputs: list[Row] = field(default_factory=list)
    """Inputs of the stitched module in place of those of the original."""

    def original(self) -> fx.GraphModule:
        graph = fx.Graph()
        values = _add(graph, [*self.inputs, *self.rows], self.meta)
        graph.output(_resolve(self.output, values))
        return fx.GraphModule(self.held, graph)

    def stitched(self) -> fx.GraphModule:
        graph, modules = fx.Graph(), dict(self.held)
        values = _add(graph, self.top_inputs or self.inputs, self.meta)
        for index, piece in enumerate(self.pieces):
            values.update(_add(graph, piece.before, self.meta, values))
            held = self.other_held[index] if self.other_held else self.held
            modules[f"segment_{index}"] = _segment(piece, self.meta, held)
            call = graph.call_module(f"segment_{index}", _resolve(tuple(piece.inputs.values()), values))
            for place, name in enumerate(piece.outputs):
                values[name] = graph.call_function(operator.getitem, (call, place))
            values.update(_add(graph, piece.after, self.meta, values))
        graph.output(_resolve(self.result, values))
        return fx.GraphModule(modules, graph)

    def edit(self, piece: int, row: str, **changes: Any) -> None:
        """Change a row of a piece."""
        rows = self.pieces[piece].rows
        place = self.place(piece, row)
        rows[place] = replace(rows[place], **changes)

    def place(self, piece: int, row: str) -> int:
        """Where a row stands in its piece."""
        return [each.name for each in self.pieces[piece].rows].index(row)

    def take(self, piece: int, row: str) -> Row:
        """Take a row out of its piece."""
        return self.pieces[piece].rows.pop(self.place(piece, row))

    def replan(self, **changes: Any) -> None:
        self.plan = replace(self.plan, **changes)

    def rebucket(self, place: int, **changes: Any) -> None:
        """Change a bucket of the plan."""
        rows = list(self.plan.buckets)
        rows[place] = replace(rows[place], **changes)
        self.replan(buckets=tuple(rows))

    def resegment(self, place: int, **changes: Any) -> None:
        """Change a segment of the plan."""
        rows = list(self.plan.segments)
        rows[place] = replace(rows[place], **changes)
        self.replan(segments=tuple(rows))


def _segment(piece: Piece, meta: Mapping[str, dict[str, Any]], held: Mapping[str, Any]) -> fx.GraphModule:
    graph = fx.Graph()
    values: dict[str, Any] = {}
    for name in piece.inputs:
        values[name] = node = graph.placeholder(name)
        node.meta = dict(meta.get(name, {}))
        node._dynamo_source = meta.get(name, {}).get("source")
    values.update(_add(graph, piece.rows, meta, values))
    graph.output(_resolve(tuple(piece.outputs.values()), values))
    return fx.GraphModule(dict(held), graph)


def _add(
    graph: fx.Graph,
    rows: list[Row],
    meta: Mapping[str, dict[str, Any]],
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Add rows to a graph; an argument may name a row further down, as only a faulty graph has it."""
    values: dict[str, Any] = dict(known or {})
    pending: list[tuple[fx.Node, Row]] = []
    for row in rows:
        values[row.name] = node = graph.create_node(row.kind, row.target, (), {}, row.name)
        node.meta = dict(meta.get(row.name, {}) if row.meta is None else row.meta)
        if row.kind == "placeholder":
            node._dynamo_source = node.meta.get("source")
        pending.append((node, row))
    for node, row in pending:
        node.args = _resolve(row.args, values)
        node.kwargs = _resolve(dict(row.kwargs), values)
    return values


def _resolve(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, (tuple, list)):
        return type(value)(_resolve(item, values) for item in value)
    if isinstance(value, dict):
        return {key: _resolve(item, values) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_resolve(item, values) for item in (value.start, value.stop, value.step)))
    return value


# --- example values ------------------------------------------------------------------------------


def traced(rows: list[Row], given: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Run rows and note on each what Dynamo would leave on its node."""
    values = dict(given)
    for row in rows:
        args, kwargs = _resolve(row.args, values), _resolve(dict(row.kwargs), values)
        values[row.name] = _run(row, args, kwargs, held)
    notes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        notes[name] = {"stack_trace": f"line of {name}", "source_fn_stack": [(name, name)]}
        if name in given:
            notes[name]["source"] = f"source of {name}"
        if isinstance(
            value, (torch.Tensor, torch.SymInt, torch.SymFloat, tuple, list, int)
        ) and not isinstance(value, bool):
            notes[name]["example_value"] = value
    return notes


def _run(row: Row, args: Any, kwargs: Any, held: Mapping[str, Any]) -> Any:
    if row.kind == "get_attr":
        return held[row.target]
    if row.kind == "call_module":
        return held[row.target](*args)
    if row.target is CHECKPOINT:
        return (args[1] * 1,)  # runs only where it is compiled
    target: Callable[..., Any] = row.target
    return (
        getattr(args[0], row.target)(*args[1:], **kwargs)
        if row.kind == "call_method"
        else target(*args, **kwargs)
    )


def symbolic_mode() -> FakeTensorMode:
    """Fake tensors whose sizes may be symbols."""
    return FakeTensorMode(shape_env=ShapeEnv())


def symbolic(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor like `tensor`, with a symbol for its first size."""
    sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (tensor.dim() - 1)]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(sizes))


def refs(text: str) -> tuple[Ref, ...]:
    """References to the values that `text` names."""
    return tuple(Ref(name) for name in text.split())
