"""Blocks where a gradient's memory is shared: other code receives it, keeps it, or writes to it."""

from ddpopt.testing.drawn.registry import register_block
from ddpopt.testing.drawn.writer import LAYER, Writer


def _hooked(w: Writer, parameter: str, on: str) -> None:
    """Register a hook on a parameter when it is made."""
    kept = w.prepared("self.kept", "[]")
    w.prepare(f"{w.helper(f'hook_{on}')}({parameter}, {kept})")


@register_block("parameter-hook", rate=2, options={"on": ("changed", "kept", "accumulated", "node")})
def hooked(w: Writer, x: str, *, on: str) -> str:
    """Add a parameter with a hook that changes or keeps its gradient."""
    shift = w.parameter(f"torch.randn({w.width})", "hooked")
    _hooked(w, shift, on)
    return f"{x} + {shift}"


@register_block(
    "large-parameter",
    rate=5,
    options={
        "layer": LAYER,
        "to": {
            "value": None,
            "parameter": None,
            "view": "parameter-view",
            "input": "input-gradient",
            "ignored": "ignored-parameter",
            "hooked": "parameter-hook",
        },
    },
)
def added(w: Writer, x: str, *, to: str) -> str:
    """Add a parameter to a value of the same size, so that one tensor is the gradient of both."""
    if to == "value":
        value = w.assign("v", x)
        return f"{value} + {w.parameter_for_rows(value)}"
    shift = w.parameter(f"torch.randn({w.width})", "large")
    return f"{x} + ({_as_large(w, to)} + {shift})"


def _as_large(w: Writer, to: str) -> str:
    """A vector to which a parameter is added, so that both get the same gradient."""
    if to == "input":
        return w.input(w.local("prompt"), f"torch.randn({w.width}, generator=g).requires_grad_()")
    if to == "view":
        return f"{w.parameter(f'torch.randn({w.half}, 2)', 'square')}.view({w.width})"
    other = w.parameter(f"torch.randn({w.width})", to, ignored=to == "ignored")
    if to == "hooked":
        _hooked(w, other, "accumulated")
    return other


@register_block("large-parameter", "graph-break", rate=2, options={"layer": LAYER}, pure=False, breaks=True)
def from_outside(w: Writer, x: str) -> str:
    """Add a parameter to one that eager code passes in."""
    w.helper("outside")
    own, other = (w.parameter(f"torch.randn({w.width})", role) for role in ("own", "foreign"))
    brought = w.assign("brought", f"outside({other})")
    return f"{x} + ({brought} + {own})"


@register_block(
    "custom-function",
    "returned-tensor",
    rate=3,
    options={"of": ("buffer", "frozen", "input", "itself"), "how": ("saved", "cloned")},
)
def returned(w: Writer, x: str, *, of: str, how: str) -> str:
    """Return a user's tensor as a gradient from a custom backward."""
    value = f"torch.randn({w.width})"
    shift = w.parameter(value, "shift")
    kept = {
        "buffer": lambda: w.buffer(value),
        "frozen": lambda: w.prepared("self.still", f"nn.Parameter({value}, requires_grad=False)"),
        "input": lambda: w.input(w.local("kept"), f"torch.randn({w.width}, generator=g)"),
        "itself": lambda: shift,
    }[of]()
    return f"{w.helper(f'Returned{how.capitalize()}')}.apply({x}, {shift}, {kept})"


@register_block(
    "in-place",
    "large-parameter",
    rate=4,
    options={"by": ("item", "index_fill", "index_put", "masked_fill", "scatter", "custom"), "layer": LAYER},
)
def overwritten(w: Writer, x: str, *, by: str) -> str:
    """Overwrite part of the sum of a value and a parameter: backward then overwrites part of the gradient."""
    value = w.assign("v", f"{x} * 1")
    place = "torch.tensor([0])"
    if by == "custom":
        w.helper("blank")
        w.line(f"{value} = {w.helper('Blanked')}.apply({value})")
    else:
        w.line(
            {
                "item": f"{value}[{place}] = 1.0",
                "index_fill": f"{value}.index_fill_(0, {place}, 1.0)",
                "index_put": f"{value}.index_put_(({place},), torch.tensor(1.0))",
                "masked_fill": f"{value}.masked_fill_({value}.detach() > 0, 1.0)",
                "scatter": f"{value}.scatter_(1, torch.zeros_like({value}, dtype=torch.int64), 1.0)",
            }[by]
        )
    return f"torch.tanh({value} + {w.parameter_for_rows(value)})"


@register_block("strides", rate=2, options={"layer": LAYER, "by": ("roll", "sort", "flip")})
def reordered(w: Writer, x: str, *, by: str) -> str:
    """Multiply by a parameter and reorder: the kernel of the gradient reads the parameter late."""
    value = f"{x} * {w.parameter(f'torch.randn({w.width})', 'factor')}"
    return {
        "roll": f"torch.roll({value}, 1, 1)",
        "sort": f"torch.sort({value}, 1).values",
        "flip": f"({value}).flip(1)",
    }[by]
