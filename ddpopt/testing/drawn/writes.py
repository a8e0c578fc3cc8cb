"""Blocks that write to a buffer or an input between two layers, in every possible way.

Each takes a view, calls a layer, writes to the view's base, and reads the view in a second layer, so a cut
between the layers separates the view from the write.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from ddpopt.testing.drawn.registry import register_block
from ddpopt.testing.drawn.writer import DEFINITIONS, Body, Writer

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
    "F": "{y} = F.batch_norm({y}, {t}, {u}, training=True)",
    "torch": "{y} = torch.batch_norm({y}, None, None, {t}, {u}, True, 0.1, 1e-1, False)",
    "native": "{y} = torch.native_batch_norm({y}, None, None, {t}, {u}, True, 0.1, 1e-1)[0]",
    "aten": "{y} = torch.ops.aten.batch_norm({y}, None, None, {t}, {u}, True, 0.1, 1e-1, False)",
    "VF": "{y} = torch._VF.batch_norm({y}, None, None, {t}, {u}, True, 0.1, 1e-1, False)",
    "instance": "{y} = {y}.t()[None]\n"
    "{y} = torch.instance_norm({y}, None, None, {t}, {u}, True, 0.1, 1e-1, False)[0].t()",
}
LOOKUPS = {
    "embedding": "{y} = {y} + F.embedding({ids}, {t}, max_norm=0.5)",
    "bag": "{y} = {y} + F.embedding_bag({ids}[:, None], {t}, max_norm=0.5)",
}
INSIDE = {
    "function": "{y} = Writing.apply({y}, {t})",
    "dirty": "{y} = Marking.apply({y}, {t})[0]",
    "allow_in_graph": "{y} = allowed({y}, {t})",
    "nonstrict_trace": "{y} = traced({y}, {t})",
    "region": "{y} = region({y}, {t})",
    "operator": "shrink({t})",
    "checkpoint": "def inside(x):\n    {t}.fill_(0.5)\n    return x.tanh()\n"
    "{y} = checkpoint(inside, {y}, use_reentrant=False)",
}
KEPT = {
    "checkpoints": "def inside(x):\n    {t}.clamp_(max=1.0)\n    return x * {t}.mean()\n"
    "{y} = {z}(checkpoint(inside, {y}, use_reentrant=False))\n"
    "{y} = checkpoint(inside, {y}, use_reentrant=False)"
}
WAYS: Mapping[str, tuple[int, Mapping[str, str], tuple[str, ...]]] = {
    "written": (8, METHODS, ()),
    "written_by_function": (6, FUNCTIONS, ()),
    "kept_and_written": (3, KEPT, ()),
    "statistics": (6, STATISTICS, ("norm",)),
    "looked_up": (3, LOOKUPS, ("embedding",)),
    "written_inside": (6, INSIDE, ()),
}
"""For each block its rate, the lines that it may write, and its other features.

The lines may use ``{y}``, a value of rows, which they may replace; ``{z}``, another layer; ``{t}``, the
written tensor; ``{u}``, a buffer for a variance; ``{ids}``, rows of ``{t}``; and names in `DEFINITIONS`.
"""


def _write(ways: Mapping[str, str], w: Writer, x: str, *, by: str, of: str, read: str, body: Body) -> str:
    """Take a view, run the body and a layer, write, and let another layer read the result.

    If backward reads it too, it sees the later value: autograd does not notice a norm's write to its
    statistics.
    """
    lines = ways[by]
    first, second = (w.module(f"nn.Linear({w.width}, {w.width})") for _ in range(2))
    made = f"torch.rand(5, {w.width}" if "{ids}" in lines else f"torch.rand({w.width}"
    written = w.buffer(f"{made})") if of == "buffer" else w.input(w.local("extra"), f"{made}, generator=g)")
    names = {"t": w.assign("t", written)}
    view = w.assign("v", f"{names['t']}.view(-1, {w.width})")
    given = w.assign("i", x)
    if read == "saved" and by != "instance":  # it raises the version counter, so eager's backward would fail
        given = w.assign("s", f"torch.tanh({given} * {names['t']})")
    names["y"] = w.assign("y", f"torch.tanh({first}({body(given)}))")
    if "{z}" in lines:
        names["z"] = w.module(f"nn.Linear({w.width}, {w.width})")
    if "{u}" in lines:
        names["u"] = w.buffer(f"torch.ones({w.width})", "variance")
    if "{ids}" in lines:
        names["ids"] = w.input("ids", "torch.randint(5, (batch,), generator=g)")
    for name in DEFINITIONS:
        if re.search(rf"\b{name}\b", lines):
            w.helper(name)
    for line in lines.format(**names).splitlines():
        w.line(line)
    if read == "returned":
        w.give_back(view)
    return f"{second}(torch.tanh({names['y']} + {view}.mean(0)))"


for _name, (_rate, _ways, _features) in WAYS.items():
    _options: dict[str, Any] = {
        "by": tuple(_ways),
        "of": {"buffer": "buffer-update", "input": "input-mutation"},
        "read": {"view": None, "returned": "returned-view"},
    }
    if _ways is STATISTICS:
        _options["read"]["saved"] = None
    if _ways is KEPT:  # a returned view keeps everything in one segment, whatever the checkpoints save
        del _options["read"]["returned"]
    _block = register_block(
        "view-and-write", *_features, name=_name, options=_options, body="any", pure=False, rate=_rate
    )
    _block(partial(_write, _ways))
