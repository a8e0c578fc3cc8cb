"""Blocks that mutate, draw random numbers, alias or break the graph, and those that only compute."""

from ddpopt.testing.drawn.registry import register_block
from ddpopt.testing.drawn.writer import Body, Writer


@register_block(options={"of": ("relu", "tanh", "sigmoid")})
def activation(_: Writer, x: str, *, of: str) -> str:
    """Apply a function without parameters."""
    return f"torch.{of}({x})"


@register_block("branches", takes=("rows", "rows"), options={"by": ("add", "gate", "where", "cat", "stack")})
def join(w: Writer, x: str, y: str, *, by: str) -> str:
    """Join two branches."""
    return {
        "add": f"{x} + {y}",
        "gate": f"{x} * torch.sigmoid({y})",
        "where": f"torch.where({x} > 0, {x}, {y})",
        "cat": f"torch.cat([{x}, {y}], 1).unflatten(1, ({w.width}, 2)).mean(2)",
        "stack": f"torch.stack([{x}, {y}]).amax(0)",
    }[by]


@register_block("tuple-value", takes="pair", gives="pair")
def swap(w: Writer, x: str) -> str:
    """Swap the items of a pair, which later steps may unpack."""
    pair = w.assign("p", x)
    return f"({pair}[1].tanh(), {pair}[0])"


@register_block("strides", takes="columns", gives="columns")
def columns(_: Writer, x: str) -> str:
    """Pass a transposed value on."""
    return f"{x} * 0.5"


@register_block("size")
def size(w: Writer, x: str) -> str:
    """Reshape by a size, which later steps may read as a number."""
    value = w.assign("v", x)
    rows = w.assign("rows", f"{value}.shape[0]")
    w.keep_number(rows)
    return f"{value}.reshape({rows}, 2, -1).transpose(1, 2).reshape({rows}, -1)"


@register_block(
    "scalar", options={"of": {"kept": None, "float": "changing-scalar", "int": "changing-scalar"}}
)
def scale(w: Writer, x: str, *, of: str) -> str:
    """Multiply by a number: one that an earlier step kept, or an input that changes from step to step."""
    changing = {"float": ("rate", "2 + step / 4"), "int": ("times", "2 + step")}
    number = w.number() if of == "kept" else w.input(*changing[of])
    return f"{x} * ({number} / 4)"


@register_block("dropout", options={"by": ("module", "function", "noise")})
def dropout(w: Writer, x: str, *, by: str) -> str:
    """Draw random numbers."""
    if by == "noise":
        value = w.assign("v", x)
        return f"{value} * torch.rand_like({value})"
    if by == "function":
        return f"F.dropout({x}, 0.5, self.training)"
    return f"{w.module('nn.Dropout(0.5)', weight='')}({x})"


@register_block("in-place", options={"by": ("activation", "operator", "item")})
def in_place(w: Writer, x: str, *, by: str) -> str:
    """Change an activation in place."""
    fresh = w.assign("f", f"{x} + 1")
    w.line(
        {
            "activation": f"F.relu_({fresh})",
            "operator": f"{fresh} *= 0.5",
            "item": f"{fresh}[:, 0] = {fresh}[:, 1]",
        }[by]
    )
    return fresh


@register_block("in-place-view", options={"written": ("view", "base"), "read": ("base", "view")}, body="any")
def write_late(w: Writer, x: str, *, written: str, read: str, body: Body) -> str:
    """Take a view, run the body, then change the view or its base in place."""
    source = w.assign("i", x)
    base = w.assign("b", f"{source} * 0.5")
    view = w.assign("v", f"{base}[:, 1:]")
    inner = w.assign("late", body(source))
    w.line(f"{view}.add_({inner}[:, 1:])" if written == "view" else f"{base}.add_({inner})")
    return base if read == "base" else f"F.pad({view}, (1, 0)) + {base}"


@register_block("in-place", options={"by": ("sum", "product", "detached")}, body="any", rate=2)
def built(w: Writer, x: str, *, by: str, body: Body) -> str:
    """Write to a value in turn, before and after the body; or, detached, only before it."""
    given = w.assign("i", x)
    made = {"sum": f"torch.zeros_like({given})", "product": f"torch.ones_like({given})"}
    value = w.assign("b", made.get(by, f"({given} * 0.5).detach()"))
    sign = "*=" if by == "product" else "+="
    w.line(f"{value} {sign} {given}")
    inner = w.assign("late", body(given))
    if by != "detached":
        w.line(f"{value} {sign} {inner}")
    return f"{inner} + {value}"


@register_block("input-mutation", pure=False)
def change_input(w: Writer, x: str) -> str:
    """Change an input in place, and read it."""
    extra = w.input("extra", f"torch.randn(batch, {w.width}, generator=g)")
    w.line(f"{extra}.add_(1)")
    return f"{x} + {extra}"


@register_block("buffer-update", options={"of": ("mean", "count")}, pure=False)
def running(w: Writer, x: str, *, of: str) -> str:
    """Read a buffer after it was changed."""
    value = w.assign("v", x)
    if of == "count":
        count = w.buffer("torch.zeros((), dtype=torch.int64)")
        w.line(f"{count} += 1")
        return f"{value} + {count}.clone()"
    mean = w.buffer(f"torch.zeros({w.width})")
    w.line(f"{mean}.lerp_({value}.detach().float().mean(0), 0.1)")
    return f"{value} - {mean}.clone()"


@register_block("custom-function")
def halved(w: Writer, x: str) -> str:
    """Call an autograd function of the model's own."""
    return f"{w.helper('Halved')}.apply({x})"


@register_block("custom-function", options={"scale": ("scaled", "decayed")})
def scaled(w: Writer, x: str, *, scale: str) -> str:
    """Call an autograd function with a parameter; its gradient depends on the loss or only on itself."""
    return f"{w.helper(scale.capitalize())}.apply({x}, {w.parameter(f'torch.ones({w.width})', 'scale')})"


@register_block("detach")
def detached(w: Writer, x: str) -> str:
    """Read a value with and without its gradient."""
    value = w.assign("v", x)
    return f"{value} - {value}.detach() * 0.5"


@register_block("graph-break", pure=False, breaks=True)
def graph_break(w: Writer, x: str) -> str:
    """Break Dynamo's graph."""
    w.line("torch._dynamo.graph_break()")
    return x
