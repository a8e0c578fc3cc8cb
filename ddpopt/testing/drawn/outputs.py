"""The outputs that a model may return besides its last value."""

from ddpopt.testing.drawn.registry import register_block
from ddpopt.testing.drawn.writer import Writer


@register_block(place="output")
def earlier(_: Writer, x: str) -> str:
    """Return an earlier value, or the last one again."""
    return x


@register_block("aliasing-outputs", place="output")
def view(w: Writer, x: str) -> str:
    """Return a value and a view of it."""
    base = w.assign("base", x)
    return f"({base}, {base}[:, 1:])"


@register_block("aliasing-input", takes=(), place="output")
def input_itself(_: Writer) -> str:
    """Return the input."""
    return "x"


@register_block("aliasing-input", takes=(), place="output")
def input_view(_: Writer) -> str:
    """Return a view of the input."""
    return "x[:, 1:]"


@register_block(
    "non-tensor-output", takes=(), place="output", options={"of": ("number", "nothing", "text", "size")}
)
def other(_: Writer, *, of: str) -> str:
    """Return something that is not a tensor."""
    return {"number": "3", "nothing": "None", "text": '"drawn"', "size": "x.shape[0]"}[of]


@register_block("integer-output", place="output", detached=True)
def places(_: Writer, x: str) -> str:
    """Return integers."""
    return f"{x}.argmax(1)"
