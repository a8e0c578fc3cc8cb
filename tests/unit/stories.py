"""Programs that are rightly cut by hand, for the certificate to certify and its mutants to break."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.utils import numpy_operator_wrapper

from ddpopt.planning.plan import Bucket, Cut, Plan, Segment
from tests.unit.stitching import CHECKPOINT, Piece, Ref, Row, Story, refs, symbolic, symbolic_mode, traced

ENTER = torch.amp.autocast_mode._enter_autocast
EXIT = torch.amp.autocast_mode._exit_autocast
GRAD = torch._C._set_grad_enabled


def first_rows() -> list[Row]:
    """Segment 0: opens an autocast span that a cut falls into, draws, writes to a buffer."""
    return [
        Row("enter", ENTER, ("cpu", torch.bfloat16, True, None)),
        Row("lin0", F.linear, refs("x w0")),
        Row("drop0", F.dropout, (Ref("lin0"), 0.5, True, False)),
        Row("count", "add_", (Ref("buf"), 1)),
        Row("view", "view", (Ref("buf"), 2, 2)),
        Row("total", "sum", refs("view")),
    ]


def second_rows() -> list[Row]:
    """Segment 1: closes the span, splits into a tuple that crosses, opens a span without gradient."""
    return [
        Row("lin1", F.linear, refs("drop0 w1")),
        Row("drop1", F.dropout, (Ref("lin1"), 0.5, True, False)),
        Row("close", EXIT, refs("enter")),
        Row("parts", torch.split, (Ref("drop1"), 2), {"dim": 1}),
        Row("read", torch.mul, (Ref("buf"), 2)),
        Row("off", GRAD, (False,)),
        Row("peek", "sum", refs("w0")),
    ]


def third_rows(parts: Any) -> list[Row]:
    """Segment 2: closes that span, and reads symbols, a tuple, a view, a constant and a body."""
    return [
        Row("scale", operator.mul, (Ref("peek"), 2)),
        Row("on", GRAD, (True,)),
        Row("cat", torch.cat, (parts, 1)),
        Row("lin2", F.linear, refs("cat w2"), {"bias": Ref("b2")}),
        Row("twice", operator.mul, (Ref("s0"), 2)),
        Row("flat", "view", (Ref("lin2"), Ref("twice"), -1)),
        Row("recount", "add_", (Ref("view"), 1)),
        Row("one", "one", op="get_attr"),
        Row("shift", torch.add, (Ref("flat"), Ref("one")), {"alpha": 1}),
        Row("pick", operator.getitem, (Ref("shift"), (slice(None, 2, None), 0))),
        Row("body", "body", op="get_attr"),
        Row("wrapped", CHECKPOINT, refs("body shift"), {"use_reentrant": False}),
        Row("inside", operator.getitem, (Ref("wrapped"), 0)),
    ]


def body(scale: float, method: str = "mul") -> fx.GraphModule:
    """The body of a higher-order operator."""
    graph = fx.Graph()
    graph.output((graph.call_method(method, (graph.placeholder("value"), scale)),))
    return fx.GraphModule({}, graph)


def story() -> Story:
    """The program, rightly cut into three."""
    held = {"one": torch.ones(()), "body": body(1.0)}
    rows = [*first_rows(), *second_rows(), *third_rows(Ref("parts"))]
    names, meta = _traced_story()
    inputs = [Row(name, name, op="placeholder") for name in names]
    output = (Ref("inside"), Ref("twice"), None, {"pick": Ref("pick"), "all": [Ref("read"), 3]}, Ref("total"))
    params = {name: f"layer.{name}" for name in ("w0", "w1", "w2", "b2")}
    notes = {name: dict(note) for name, note in meta.items()}
    return Story(inputs, rows, output, pieces(), output, plan(), params, notes, held)


@functools.cache
def _traced_story() -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    """The story's inputs, and what tracing leaves on its nodes; nobody changes an example value."""
    mode = symbolic_mode()
    sizes = {"w0": (4, 4), "w1": (4, 4), "w2": (4, 4), "b2": (4,)}
    with mode:
        given: dict[str, Any] = {name: nn.Parameter(torch.empty(size)) for name, size in sizes.items()}
        given["buf"] = torch.empty(4)
    given["x"] = symbolic(mode, torch.empty(3, 4))
    given["s0"] = given["x"].shape[0]
    rows = [*first_rows(), *second_rows(), *third_rows(Ref("parts"))]
    with mode, torch.enable_grad():
        meta = traced(rows, given, {"one": torch.ones(()), "body": None})
    for place, item in enumerate(meta["parts"]["example_value"]):
        meta[f"parts_{place}"] = {"example_value": item}
    return tuple(given), meta


def pieces() -> list[Piece]:
    """What a cut in front of ``lin1`` and one in front of ``scale`` makes of the program."""
    first = Piece(
        {name: Ref(name) for name in ("s0", "x", "w0", "buf")},
        [*first_rows(), Row("leave", EXIT, refs("enter"))],
        {"drop0": Ref("drop0"), "total": Ref("total")},
    )
    second = Piece(
        {"s0": Ref("s0"), "drop0": Ref("drop0"), "w1": Ref("w1"), "buf": Ref("kept"), "w0": Ref("still")},
        [
            Row("again", ENTER, ("cpu", torch.bfloat16, True, None)),
            *(replace(row, args=refs("again")) if row.name == "close" else row for row in second_rows()),
            Row("leave", GRAD, (True,)),
            Row("parts_0", operator.getitem, (Ref("parts"), 0)),
            Row("parts_1", operator.getitem, (Ref("parts"), 1)),
        ],
        {name: Ref(name) for name in ("parts_0", "parts_1", "read", "peek")},
        before=[Row("kept", "clone", refs("buf"), meta={}), Row("still", "detach", refs("w0"), meta={})],
    )
    third = Piece(
        {name: Ref(name) for name in ("s0", "peek", "parts_0", "parts_1", "w2", "b2", "buf")},
        [
            Row("again", GRAD, (False,)),
            *(row for row in third_rows(refs("parts_0 parts_1"))),
        ],
        {name: Ref(name) for name in ("inside", "twice", "pick")},
    )
    # the view of a buffer that is written to is taken again, from what the segment gets
    third.rows.insert(
        [row.name for row in third.rows].index("recount"), Row("view", "view", (Ref("buf"), 2, 2))
    )
    return [first, second, third]


def plan() -> Plan:
    """The plan that the pieces keep."""
    rows = [first_rows(), second_rows(), third_rows(None)]
    nodes = [node_names(part) for part in rows]
    segments = tuple(
        Segment(index, 0, nodes[index], params, (2 - index,))
        for index, params in enumerate((("layer.w0",), ("layer.w1",), ("layer.w2", "layer.b2")))
    )
    buckets = tuple(
        Bucket(index, segments[2 - index].params, 64, "float32", "cpu", 2 - index, "full")
        for index in range(3)
    )
    return Plan(buckets, segments, (Cut(0, "lin1", "bucket 1"), Cut(0, "scale", "bucket 0")))


def node_names(rows: Sequence[Row]) -> tuple[str, ...]:
    """The names that a plan lists for rows."""
    return tuple(row.name for row in rows if row.kind != "get_attr")


# --- small programs --------------------------------------------------------------------------------


def cut_in_two(
    given: Mapping[str, Any],
    first: Sequence[Row],
    second: Sequence[Row],
    crossing: str,
    *,
    params: tuple[str, str],
    again: Sequence[Row] = (),
    held: Mapping[str, Any] | None = None,
) -> Story:
    """A program that returns its last row, cut once.

    Args:
        given: example values of its inputs, ``x`` among them; all of them go to the first segment.
        first: rows of segment 0.
        second: rows of segment 1.
        crossing: what segment 1 gets, by name.
        params: the parameters that complete in each segment, by name.
        again: rows of the first segment that the second one repeats.
        held: attributes.
    """
    held = dict(held or {})
    with given["x"].fake_mode, torch.enable_grad():
        meta = traced([*first, *second], given, held)
    inputs = [Row(name, name, op="placeholder") for name in given]
    handed = [name for name in crossing.split() if name not in given]
    pieces = [
        Piece({name: Ref(name) for name in given}, [*first], {name: Ref(name) for name in handed}),
        Piece(
            {name: Ref(name) for name in crossing.split()}, [*again, *second], {"end": Ref(second[-1].name)}
        ),
    ]
    completed = [tuple(text.split()) for text in params]
    buckets = [
        Bucket(index, names, 64, "float32", "cpu", segment, "full")
        for index, (segment, names) in enumerate(
            (s, n) for s, n in ((1, completed[1]), (0, completed[0])) if n
        )
    ]
    segments = tuple(
        Segment(s, 0, node_names(rows), completed[s], tuple(b.index for b in buckets if b.segment == s))
        for s, rows in enumerate((first, second))
    )
    opener = segments[1].nodes[0]
    plan = Plan(tuple(buckets), segments, (Cut(0, opener, "bucket 0"),))
    names = {name: name for text in completed for name in text if name in given}
    return Story(inputs, [*first, *second], Ref(second[-1].name), pieces, Ref("end"), plan, names, meta, held)


def weights(names: str) -> dict[str, Any]:
    """Parameters of 4 x 4 elements, and an input ``x`` of 4 x 4."""
    with symbolic_mode():
        return {"x": torch.empty(4, 4), **{name: nn.Parameter(torch.empty(4, 4)) for name in names.split()}}


def doubled_size() -> Story:
    """What crosses has twice a symbol for its size, so the symbol crosses too."""
    mode = symbolic_mode()
    x = symbolic(mode, torch.empty(3, 4))
    with mode:
        given = {"s": x.shape[0], "x": x, "w": nn.Parameter(torch.empty(4, 4))}
    first = [Row("pair", torch.cat, (list(refs("x x")), 0))]
    return cut_in_two(given, first, [Row("lin", F.linear, refs("pair w"))], "s pair w", params=("", "w"))


def constant() -> Story:
    """A size that tracing fixed crosses as the number that it is."""
    first = [Row("lin0", F.linear, refs("x v")), Row("size", "size", (Ref("lin0"), 1))]
    second = [Row("lin1", F.linear, refs("lin0 w")), Row("end", torch.mul, refs("lin1 size"))]
    told = cut_in_two(weights("v w"), first, second, "lin0 w", params=("v", "w"))
    told.edit(1, "end", args=(Ref("lin1"), 4))
    return told


def symbolic_number() -> Story:
    """A fraction of a symbol cannot cross, so the second segment computes it again."""
    mode = symbolic_mode()
    x = symbolic(mode, torch.empty(3, 4))
    with mode:
        given = {"s": x.shape[0], "x": x, "w": nn.Parameter(torch.empty(4, 4))}
    ratio = Row("ratio", operator.truediv, (1, Ref("s")))
    second = [Row("lin", F.linear, refs("pre w")), Row("end", torch.mul, refs("lin ratio"))]
    first = [ratio, Row("pre", torch.mul, refs("x ratio"))]
    return cut_in_two(given, first, second, "s pre w", params=("", "w"), again=[ratio])


def indexed_view() -> Story:
    """A row of a buffer is a view of it, which the segment that writes to it takes again."""
    given = weights("v w")
    with given["x"].fake_mode:
        given["buf"] = torch.empty(2, 4)
    row = Row("row", operator.getitem, (Ref("buf"), 0))
    first = [row, Row("added", torch.add, refs("x row")), Row("lin0", F.linear, refs("added v"))]
    second = [Row("count", "add_", (Ref("row"), 1)), Row("lin1", F.linear, refs("lin0 w"))]
    return cut_in_two(given, first, second, "lin0 buf w", params=("v", "w"), again=[row])


def written_buffer(notation: str = "__imul__") -> Story:
    """A buffer that the second segment writes to, and then reads by a view that it takes again."""
    given = weights("v w")
    with given["x"].fake_mode:
        given["buf"], given["rows"] = torch.empty(4, 4), torch.zeros(2, dtype=torch.int64)
    view = Row("view", "view", (Ref("buf"), 2, 8))
    after = [
        Row("lin1", F.linear, refs("lin0 w")),
        Row("seen", "sum", refs("view")),
        Row("end", torch.add, refs("lin1 seen")),
    ]
    return cut_in_two(
        given,
        [view, Row("lin0", F.linear, refs("x v"))],
        [*WRITES[notation], *after],
        "lin0 rows buf w",
        params=("v", "w"),
        again=[view],
        held={"body": body(1.0, "mul_")},
    )


def halve(value: torch.Tensor) -> torch.Tensor:
    """What nobody knows to write to its argument."""
    return value.mul_(0.5).sum()


_ROW = Row("row", operator.getitem, (Ref("buf"), 0))
WRITES: Mapping[str, Sequence[Row]] = {
    "__imul__": [Row("write", "__imul__", (Ref("buf"), 0.5))],
    "batch_norm": [
        _ROW,
        Row("write", torch.batch_norm, (*refs("lin0 row row row row"), True, 0.1, 1e-5, False)),
    ],
    "embedding": [Row("write", F.embedding, refs("rows buf"), {"max_norm": 1.0})],
    "numpy": [Row("write", numpy_operator_wrapper(operator.imul), (Ref("buf"), 0.5))],
    "an unknown function": [Row("write", halve, refs("buf"))],
    "a body": [
        Row("body", "body", op="get_attr"),
        Row("write", CHECKPOINT, refs("body buf"), {"use_reentrant": False}),
    ],
}
"""Ways to write to a buffer of which some are known by a table only."""


def read_and_written(*reads: Row) -> Story:
    """A buffer with gaps in its memory is read in the first segment, and written to in the second."""
    given = weights("v w")
    with given["x"].fake_mode:
        given["buf"], given["like"] = torch.empty(4, 8)[:, ::2], torch.empty(4, 4)
    first = [*reads, Row("seen", "sum", refs("buf")), Row("lin0", F.linear, refs("x v"))]
    writes = [Row("write", "mul_", (Ref("buf"), 0.5)), Row("bump", "add_", (Ref("like"), 1))]
    second = [*writes, Row("lin1", F.linear, refs("lin0 w")), Row("end", torch.add, refs("lin1 seen"))]
    return cut_in_two(given, first, second, "lin0 seen buf like w", params=("v", "w"))


VIEW_AS = Row("view", "view_as", refs("buf like"))
AS_STRIDED = Row("view", "as_strided", (Ref("like"), (2,), (1,), 3))


def reshaped_view() -> Story:
    """A view is transposed in place, and handed on as it is then."""
    first = [
        Row("lin0", F.linear, refs("x v")),
        Row("view", "view", (Ref("lin0"), 4, 4)),
        Row("turned", "t_", refs("view")),
    ]
    second = [Row("lin1", F.linear, refs("turned w"))]
    return cut_in_two(weights("v w"), first, second, "turned w", params=("v", "w"))


def view_without_grad() -> Story:
    """A view that is taken without gradient is taken once more behind the cut, without gradient again."""
    row = Row("view", "view", (Ref("lin0"), 4, 4))
    first = [Row("lin0", F.linear, refs("x v")), Row("off", GRAD, (False,)), row, Row("on", GRAD, (True,))]
    second = [Row("lin1", F.linear, refs("view w")), Row("end", torch.add, refs("lin1 lin0"))]
    told = cut_in_two(weights("v w"), first, second, "lin0 w", params=("v", "w"))
    again = [Row("before", GRAD, (False,), meta={}), row, Row("behind", GRAD, (True,), meta={})]
    told.pieces[1].rows[:0] = again
    told.pieces[0].outputs["view"] = Ref("view")
    told.output = (told.output, Ref("view"))
    loose = Row("loose", "detach", refs("view"), meta={})
    told.pieces[1].after.append(loose)
    told.result = (told.result, Ref("loose"))
    return told


def tied_weight() -> Story:
    """A weight that both segments read is complete in the first one."""
    first = [Row("lin0", F.linear, refs("x w"))]
    second = [Row("lin1", F.linear, refs("lin0 v")), Row("lin2", F.linear, refs("lin1 w"))]
    return cut_in_two(weights("v w"), first, second, "lin0 v w", params=("w", "v"))


def early_reader_without_gradient(*early: Row) -> Story:
    """A weight that the first segment only looks at is complete in the second one."""
    first = [*early, Row("lin0", F.linear, refs("x v"))]
    told = cut_in_two(
        weights("v w"), first, [Row("lin1", F.linear, refs("lin0 w"))], "lin0 w", params=("v", "w")
    )
    told.pieces[0].inputs["w"] = Ref("loose")
    told.pieces[0].before.append(Row("loose", "detach", refs("w"), meta={}))
    return told


def module_call() -> Story:
    """A module that is called whole reads its own parameters."""
    given = weights("w")
    with given["x"].fake_mode:
        held = {"layer": nn.Linear(4, 4)}
    first = [Row("lin0", F.linear, refs("x w"))]
    second = [Row("called", "layer", refs("lin0"), op="call_module")]
    told = cut_in_two(given, first, second, "lin0", params=("w", "layer.weight layer.bias"), held=held)
    told.names = {"w": "w", "called.weight": "layer.weight", "called.bias": "layer.bias"}
    return told


SMALL: tuple[Callable[[], Story], ...] = (
    doubled_size,
    constant,
    symbolic_number,
    indexed_view,
    read_and_written,
    reshaped_view,
    view_without_grad,
    written_buffer,
    tied_weight,
    module_call,
)
"""The small programs that need no argument."""


@dataclass(frozen=True)
class Mutant:
    """A broken cut.

    Attributes:
        claim: what was broken.
        says: words of the sentence with which the certificate must reject it.
        breaks: breaks the program.
        told: makes the right program.
    """

    claim: str
    says: str
    breaks: Callable[[Story], object]
    told: Callable[[], Story] = story
