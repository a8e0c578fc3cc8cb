"""Blocks that write to a buffer or an input in every way there is, between two layers and beside a view.

Each takes a view, calls a layer, writes to what the view is of, and reads the view for a second layer: so a
cut between the layers has the view in front of it and the write behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddpopt.testing.drawn.registry import register_block
from ddpopt.testing.drawn.writer import Body, Writer

OPTIONS: Mapping[str, Any] = {
    "of": {"buffer": "buffer-update", "input": "input-mutation"},
    "read": {"view": None, "returned": "returned-view"},
}
"""What is written to, and whether the view of it is returned, too."""
METHODS = {
    "add_": "{t}.add_(0.5)",
    "imul": "{t}.__imul__(0.9)",
    "operator": "{t} += 0.5",
    "item": "{t}[0] = 0.5",
    "numpy": "a = {t}.numpy()\na *= 0.9",
}
FUNCTIONS = {
    "relu": "F.relu({t}, inplace=True)",
    "out": "torch.mul({t}, 0.9, out={t})",
    "foreach": "torch._foreach_mul_([{t}], 0.9)",
    "detach": "{t}.detach().mul_(0.9)",
}
STATISTICS = {
    "F": "F.batch_norm({x}, {t}, {u}, training=True)",
    "torch": "torch.batch_norm({x}, None, None, {t}, {u}, True, 0.1, 1e-1, False)",
    "native": "torch.native_batch_norm({x}, None, None, {t}, {u}, True, 0.1, 1e-1)[0]",
    "aten": "torch.ops.aten.batch_norm({x}, None, None, {t}, {u}, True, 0.1, 1e-1, False)",
    "VF": "torch._VF.batch_norm({x}, None, None, {t}, {u}, True, 0.1, 1e-1, False)",
    "instance": "torch.instance_norm({x}.t()[None], None, None, {t}, {u}, True, 0.1, 1e-1, False)[0].t()",
}
LOOKUPS = {
    "embedding": "F.embedding({ids}, {t}, max_norm=0.5)",
    "bag": "F.embedding_bag({ids}[:, None], {t}, max_norm=0.5)",
}
INSIDE = {
    "function": ("Writing", "{y} = Writing.apply({y}, {t})"),
    "dirty": ("Marking", "{y} = Marking.apply({y}, {t})[0]"),
    "allow_in_graph": ("allowed", "{y} = allowed({y}, {t})"),
    "nonstrict_trace": ("traced", "{y} = traced({y}, {t})"),
    "region": ("region", "{y} = region({y}, {t})"),
    "operator": ("shrink", "shrink({t})"),
    "checkpoint": (
        "checkpoint",
        "def inside(x):\n    {t}.fill_(0.5)\n    return x.tanh()\n"
        "{y} = checkpoint(inside, {y}, use_reentrant=False)",
    ),
}
"""For each sort of body what is defined for it, and the lines that call it."""


def _around(
    w: Writer, x: str, body: Body, options: Mapping[str, str], shape: str, write: Callable[[str, str], None]
) -> str:
    """Take a view, run the body and a layer, write, and have another layer read what was written to.

    Args:
        w: the writer.
        x: what the block reads.
        body: its body.
        options: of `OPTIONS`.
        shape: of what is written to; its last dimension is a row.
        write: given the value so far, and what to write to.
    """
    first, second = (w.module(f"nn.Linear({w.width}, {w.width})") for _ in range(2))
    target = w.assign(
        "t",
        w.buffer(f"torch.rand({shape})")
        if options["of"] == "buffer"
        else w.input(w.local("extra"), f"torch.rand({shape}, generator=g)"),
    )
    view = w.assign("v", f"{target}.view(-1, {w.width})")
    inner = w.assign("y", f"torch.tanh({first}({body(w.assign('i', x))}))")
    write(inner, target)
    if options["read"] == "returned":
        w.give_back(view)
    return f"{second}(torch.tanh({inner} + {view}.mean(0)))"


@register_block("view-and-write", options={"by": tuple(METHODS), **OPTIONS}, body="any", pure=False, rate=8)
def written(w: Writer, x: str, *, by: str, body: Body, **options: str) -> str:
    """Write by a method, an operator or NumPy."""
    return _around(w, x, body, options, f"{w.width}", _lines(w, METHODS[by]))


@register_block("view-and-write", options={"by": tuple(FUNCTIONS), **OPTIONS}, body="any", pure=False, rate=6)
def written_by_function(w: Writer, x: str, *, by: str, body: Body, **options: str) -> str:
    """Write by a function, or through another alias."""
    return _around(w, x, body, options, f"{w.width}", _lines(w, FUNCTIONS[by]))


def _lines(w: Writer, template: str) -> Callable[[str, str], None]:
    def write(y: str, t: str) -> None:
        for line in template.format(x=y, y=y, t=t).splitlines():
            w.line(line)

    return write


@register_block(
    "view-and-write", "norm", options={"by": tuple(STATISTICS), **OPTIONS}, body="any", pure=False, rate=4
)
def statistics(w: Writer, x: str, *, by: str, body: Body, **options: str) -> str:
    """Track statistics by a function, whose schema may mark no write."""
    variance = w.buffer(f"torch.ones({w.width})", "variance")

    def write(y: str, t: str) -> None:
        w.line(f"{y} = {STATISTICS[by].format(x=y, t=t, u=variance)}")

    return _around(w, x, body, options, f"{w.width}", write)


@register_block(
    "view-and-write", "embedding", options={"by": tuple(LOOKUPS), **OPTIONS}, body="any", pure=False, rate=3
)
def looked_up(w: Writer, x: str, *, by: str, body: Body, **options: str) -> str:
    """Look rows up, which makes those that are too long shorter."""

    def write(y: str, t: str) -> None:
        ids = w.input("ids", "torch.randint(5, (batch,), generator=g)")
        w.line(f"{y} = {y} + {LOOKUPS[by].format(ids=ids, t=t)}")

    return _around(w, x, body, options, f"5, {w.width}", write)


@register_block("view-and-write", options={"by": tuple(INSIDE), **OPTIONS}, body="any", pure=False, rate=6)
def written_inside(w: Writer, x: str, *, by: str, body: Body, **options: str) -> str:
    """Write in a body of another kind: a checkpoint, a function of autograd's, an operator."""
    helper, lines = INSIDE[by]
    w.helper(helper)
    return _around(w, x, body, options, f"{w.width}", _lines(w, lines))
