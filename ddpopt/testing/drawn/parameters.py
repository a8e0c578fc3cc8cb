"""Blocks about parameters: views, lists, empty, 0-d, complex and half-precision ones, parametrizations."""

from ddpopt.testing.drawn.registry import register_block
from ddpopt.testing.drawn.writer import LAYER, Writer


@register_block("scalar-parameter", options={"layer": LAYER})
def gain(w: Writer, x: str) -> str:
    """Multiply by a parameter without dimensions."""
    return f"{x} * {w.parameter('torch.tensor(0.5)', 'gain')}"


@register_block("empty-parameter", options={"layer": LAYER})
def empty(w: Writer, x: str) -> str:
    """Read a parameter without elements."""
    return f"torch.cat([{x}, {w.parameter(f'torch.empty(0, {w.width})', 'empty')}])"


@register_block("nested-parameter", options={"layer": LAYER})
def halves(w: Writer, x: str) -> str:
    """Read two parameters within a list."""
    rows = [w.parameter(f"torch.randn({w.half}, {w.width}) / {w.width}", role) for role in ("upper", "lower")]
    return f"F.linear({x}, torch.cat([{', '.join(rows)}]))"


@register_block("parameter-view", options={"layer": LAYER})
def slices(w: Writer, x: str) -> str:
    """Read two slices of one parameter."""
    size = w.width * w.width
    flat = w.parameter(f"torch.randn({size + w.width}) / {w.width}", "flat")
    return f"F.linear({x}, {flat}[:{size}].view({w.width}, -1), {flat}[{size}:])"


@register_block("parameter-view")
def storage(w: Writer, x: str) -> str:
    """Read two parameters that are views of one storage."""
    flat = w.prepared("storage", f"torch.randn(2, {w.width}, {w.width}) / {w.width}")
    first, second = (w.parameter(f"{flat}[{place}]", role) for place, role in enumerate(("near", "far")))
    return f"({x} @ {first}) @ {second}"


@register_block("complex", takes="complex", gives="complex", options={"layer": LAYER})
def complex_gain(w: Writer, x: str) -> str:
    """Multiply by a complex parameter."""
    return f"{x} * {w.parameter(f'torch.randn({w.half}, dtype=torch.complex64)', 'phase')}"


@register_block("complex", takes="complex", gives="complex", options={"of": ("spectrum", "value")})
def fourier(_: Writer, x: str, *, of: str) -> str:
    """Conjugate complex numbers lazily, perhaps transformed ones."""
    return f'torch.fft.fft({x}, norm="ortho").conj()' if of == "spectrum" else f"{x}.conj()"


@register_block("mixed-dtypes", takes="bfloat16", gives="bfloat16", options={"layer": LAYER})
def bfloat16_linear(w: Writer, x: str) -> str:
    """Call a layer in bfloat16."""
    return f"{w.module(f'nn.Linear({w.width}, {w.width}, dtype=torch.bfloat16)')}({x})"


@register_block("mixed-dtypes", takes="double", gives="double", options={"layer": LAYER})
def double_linear(w: Writer, x: str) -> str:
    """Call a layer in float64."""
    return f"{w.module(f'nn.Linear({w.width}, {w.width}, dtype=torch.float64)')}({x})"


@register_block(
    "parametrization",
    options={"layer": {"new": None, "again": LAYER["again"]}, "how": ("weight_norm", "own")},
)
def parametrized(w: Writer, x: str, *, how: str) -> str:
    """Call a layer whose weight is computed from other parameters."""
    plain = f"nn.Linear({w.width}, {w.width})"
    if how == "weight_norm":
        return f"{w.module(f'{w.helper(how)}({plain})')}({x})"
    register = w.helper("register_parametrization")
    layer = w.module(f'{register}({plain}, "weight", {w.helper("Symmetric")}())')
    return f"{layer}({x})"


@register_block("unused-parameter")
def unused(w: Writer, x: str) -> str:
    """Make a parameter that nothing reads."""
    w.prepare(f"self.{w.local('unused')} = nn.Parameter(torch.randn({w.width}))")
    return x
