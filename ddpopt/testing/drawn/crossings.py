"""Blocks that are hard to cut: their values, or the state they set, cannot pass from piece to piece."""

from ddpopt.testing.drawn.registry import register_block
from ddpopt.testing.drawn.writer import LAYER, Body, Writer


@register_block("towers", takes=())
def tower(_: Writer) -> str:
    """Start again from the input: later steps do not depend on earlier ones."""
    return "x"


@register_block("size", body="any", options={"of": ("shape", "ratio")})
def measured(w: Writer, x: str, *, of: str, body: Body) -> str:
    """Read a shape, or a fraction of a size, before the body, and use it after."""
    value = w.assign("v", x)
    if of == "shape":
        shape = w.assign("shape", f"{value}.shape")
        return f"({body(value)}).reshape({shape})"
    ratio = w.assign("ratio", f"{value}.shape[0] / 4")
    return f"({body(value)}) * {ratio}"


@register_block("in-place", body="any", options={"of": {"value": "in-place", "view": "in-place-view"}})
def reshape_late(w: Writer, x: str, *, body: Body, of: str) -> str:
    """Change a shape in place: of a value after the body, or of a view taken before it and read after it."""
    source = w.assign("i", x)
    base = w.assign("b", f"{source} * 0.5")
    if of == "view":
        base = w.assign("v", f"{base}[:, :]")
        w.line(f"{base}.unsqueeze_(0)")
    inner = w.assign("late", body(source))
    if of == "value":
        w.line(f"{base}.unsqueeze_(0)")
    return f"{base}[0] + {inner}"


@register_block("own-gradient", rate=3, body="any", options={"by": ("function", "hook")})
def turned(w: Writer, x: str, *, body: Body, by: str) -> str:
    """After the body, read a view whose gradient is reversed by an autograd function or a hook."""
    value = w.assign("v", x)
    if by == "function":
        view = w.assign("view", f"{w.helper('Turned')}.apply({value})")
        return f"({body(value)}) + {view}"
    inner = w.assign("inner", body(value))
    view = w.assign("view", f"{value}.view_as({value})")
    w.line(f"{view}.requires_grad and {view}.register_hook(torch.neg)")
    return f"{inner} + {view}"


@register_block("detach", body="any", options={"of": {"windows": "overlap", "roots": None}})
def read_late(w: Writer, x: str, *, body: Body, of: str) -> str:
    """Before the body take a view that overlaps itself, or a value that gets no gradient; read it after."""
    value = w.assign("v", x)
    taken = {"windows": f"({value} * 2).unfold(1, 2, 1)", "roots": f"({value} * 0).sqrt()"}[of]
    early = w.assign("early", taken)
    read = {"windows": f"F.pad({early}.sum(2), (1, 0))", "roots": f"{early}.detach()"}[of]
    return f"({body(value)}) + {read}"


@register_block(
    "matmul", options={"layer": LAYER, "by": {"vmap": "vmap", "grad": "functional-grad"}}, pure=False
)
def transformed(w: Writer, x: str, *, by: str) -> str:
    """Run two layers for each row, or differentiate their output, with ``torch.func``."""
    first, second = (w.module(f"nn.Linear({w.width}, {w.width})") for _ in range(2))
    run = w.local("run")
    with w.nested(f"def {run}(row):"):
        w.line(f"return {second}(torch.tanh({first}(row)))")
    if by == "vmap":
        return f"torch.func.vmap({run})({x})"
    return f"torch.func.grad(lambda rows: {run}(rows).float().square().sum())({x})"


@register_block("nested-tensor", options={"layer": LAYER}, pure=False)
def ragged(w: Writer, x: str) -> str:
    """Call two layers on a nested tensor whose parts are rows."""
    first, second = (w.module(f"nn.Linear({w.width}, {w.width})") for _ in range(2))
    rows = w.assign("v", f"{x}.contiguous()")
    ends = f"torch.arange({rows}.shape[0] + 1)"
    parts = w.assign("parts", f"torch.nested.nested_tensor_from_jagged({rows}, {ends})")
    return f"{second}({first}({parts})).values()"


@register_block("parameter-update", options={"read": ("parameter", "result")}, pure=False)
def decayed(w: Writer, x: str, *, read: str) -> str:
    """Change a parameter in place, use another one, then read a view of the first or of the result."""
    weight = w.parameter(f"torch.randn({w.width}, {w.width}) / {w.width}")
    shift = w.parameter(f"torch.zeros({w.width})", "shift")
    with w.nested("with torch.no_grad():"):
        if read == "result":
            weight = w.assign("w", f"{weight}.mul_(0.9)")
        else:
            w.line(f"{weight}.mul_(0.9)")
    view = w.assign("view", f"{weight}.t()")
    value = w.assign("v", f"{x} + {shift}")
    return f"{value} @ {view}.clone()"


@register_block(
    "embedding",
    body="any",
    options={
        "by": ("lookup", "gather"),
        "gradient": {"dense": None, "sparse": "sparse-table"},
        "times": (2, -1),
    },
)
def looked_up_late(w: Writer, x: str, *, by: str, gradient: str, times: int, body: Body) -> str:
    """Compute a table before the body, and look rows up in it after; its gradient is dense or sparse."""
    sparse = gradient == "sparse" and w.reached
    if not sparse:
        w.miss("sparse-table")
    layer = w.module(f"nn.Embedding(5, {w.width}{', sparse=True' if sparse else ''})")
    value = w.assign("v", x)
    table = w.assign("table", f"{layer}.weight * {times}")
    inner = w.assign("inner", body(value))
    rows = w.input("ids", "torch.randint(5, (batch,), generator=g)")
    if by == "lookup":
        return f"{inner} + F.embedding({rows}, {table}, sparse={sparse})"
    return f"{inner} + torch.gather({table}, 0, {rows}[:, None].expand(-1, {w.width}), sparse_grad={sparse})"
