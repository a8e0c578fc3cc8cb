"""Blocks with a body: residuals, loops, submodules, autograd and autocast regions, checkpoints, branches."""

from ddpopt.testing.drawn.registry import register_block
from ddpopt.testing.drawn.writer import LAYER, Body, Writer


@register_block("residual", body="any")
def residual(w: Writer, x: str, *, body: Body) -> str:
    """Add the body's output."""
    value = w.assign("i", x)
    return f"{value} + {body(value)}"


@register_block("repeated-module", body="unbroken", options={"times": (2, 3)})
def repeat(w: Writer, x: str, *, times: int, body: Body) -> str:
    """Run the body several times, with the same parameters."""
    state = w.assign("s", x)
    with w.nested(f"for _ in range({times}):"):
        w.line(f"{state} = {body(state)}")
    return state


@register_block("submodule", body="any", options={"calls": {1: None, 2: "repeated-module"}})
def submodule(w: Writer, x: str, *, calls: int, body: Body) -> str:
    """Run the body as a separate module, once or twice."""
    name = f"self.{w.local('block')}"
    with w.submodule() as inner:
        w.line(f"return {body('x')}")
    more = "".join(f", {argument}" for argument in inner.arguments[1:])
    return f"{name}({x}{more})" if calls == 1 else f"{name}({name}({x}{more}){more})"


@register_block(
    "no-grad",
    body="any",
    options={"layers": {"frozen": None, "trainable": "unused-parameter"}},
    detached=True,
)
def no_grad(w: Writer, x: str, *, layers: str, body: Body) -> str:
    """Run the body without autograd."""
    value = w.local("n")
    with w.nested("with torch.no_grad():", grad=False, frozen=layers == "frozen"):
        w.line(f"{value} = {body(x)}")
    return value


@register_block("autocast", body="any")
def autocast(w: Writer, x: str, *, body: Body) -> str:
    """Run the body under autocast."""
    value = w.local("a")
    before = w.assign("i", x)
    with w.nested('with torch.autocast("cpu", dtype=torch.bfloat16):', autocast=True):
        w.line(f"{value} = {body(before)}")
    return f"{value}.float()"


@register_block("checkpoint", body="pure")
def checkpointed(w: Writer, x: str, *, body: Body) -> str:
    """Run the body again in backward."""
    name = w.local("run")
    with w.nested(f"def {name}(x):"):
        w.line(f"return {body('x')}")
    return f"{w.helper('checkpoint')}({name}, {x}, use_reentrant=False)"


@register_block(
    "branches", options={"layer": LAYER, "by": {"where": None, "gate": None, "cond": "cond"}}, pure=False
)
def select(w: Writer, x: str, *, by: str) -> str:
    """Run one of two layers, or both; ``torch.cond`` is rare, because it compiles even in eager."""
    value = w.assign("c", x)
    first, second = (w.module(f"nn.Linear({w.width}, {w.width})") for _ in range(2))
    return {
        "where": f"torch.where({value} > 0, {first}({value}), {second}({value}))",
        "gate": f"{first}({value}) * torch.sigmoid({second}({value}))",
        "cond": f"torch.cond({value}.sum() > 0, {first}, {second}, ({value},))",
    }[by]
