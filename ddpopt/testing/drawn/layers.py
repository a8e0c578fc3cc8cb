"""Blocks with layers: products, convolutions, norms, embeddings, attention, recurrence."""

from ddpopt.testing.drawn.registry import register_block
from ddpopt.testing.drawn.writer import LAYER, Writer


@register_block(
    "matmul",
    options={"layer": LAYER, "bias": (True, False), "call": {"module": None, "keyword": "keyword-parameter"}},
)
def linear(w: Writer, x: str, *, bias: bool, call: str) -> str:
    """Call a linear layer, or read its parameters by keyword."""
    layer = w.module(f"nn.Linear({w.width}, {w.width}{'' if bias else ', bias=False'})")
    by_keyword = f"F.linear(input={x}, weight={layer}.weight, bias={layer}.bias)"
    return by_keyword if call == "keyword" else f"{layer}({x})"


@register_block("matmul", options={"layer": LAYER, "times": (2, 8)})
def wide(w: Writer, x: str, *, times: int) -> str:
    """Widen, activate and narrow again; by eight, the parameters skew the buckets."""
    up = w.module(f"nn.Linear({w.width}, {times * w.width})")
    down = w.module(f"nn.Linear({times * w.width}, {w.width})")
    return f"{down}(torch.relu({up}({x})))"


@register_block("matmul", options={"layer": LAYER, "order": ("right", "left")})
def product(w: Writer, x: str, *, order: str) -> str:
    """Multiply by a parameter from either side; from the left the result is not contiguous."""
    weight = w.parameter(f"torch.randn({w.width}, {w.width}) / {w.width}")
    return f"{x} @ {weight}.t()" if order == "right" else f"({weight} @ {x}.t()).t()"


@register_block(
    "conv",
    takes="image",
    gives="image",
    options={
        "layer": LAYER,
        "memory": {"contiguous": None, "channels_last": "channels-last"},
        "groups": ("all", "each"),
    },
)
def conv(w: Writer, x: str, *, memory: str, groups: str) -> str:
    """Convolve an image, perhaps in another memory format."""
    split = f", groups={w.quarter}" if groups == "each" else ""
    layer = w.module(f"nn.Conv2d({w.quarter}, {w.quarter}, 3, padding=1{split})")
    if memory == "channels_last":
        x = f"{x}.to(memory_format=torch.channels_last)"
    return f"{layer}({x})"


@register_block("conv", takes="tokens", gives="tokens", options={"layer": LAYER})
def conv1d(w: Writer, x: str) -> str:
    """Convolve a sequence."""
    return f"{w.module('nn.Conv1d(2, 2, 3, padding=1)')}({x})"


@register_block("norm", options={"layer": LAYER})
def layer_norm(w: Writer, x: str) -> str:
    """Normalize each sample."""
    return f"{w.module(f'nn.LayerNorm({w.width}, eps=0.1)')}({x})"


@register_block("norm", takes="image", gives="image", options={"layer": LAYER})
def group_norm(w: Writer, x: str) -> str:
    """Normalize an image over all its channels."""
    return f"{w.module(f'nn.GroupNorm(1, {w.quarter}, eps=0.1)')}({x})"


@register_block("norm-with-buffers", options={"layer": LAYER}, pure=False)
def batch_norm(w: Writer, x: str) -> str:
    """Normalize over the batch, and track the statistics in buffers."""
    return f"{w.module(f'nn.BatchNorm1d({w.width}, eps=0.1)')}({x})"


@register_block("norm-with-buffers", takes="image", gives="image", options={"layer": LAYER}, pure=False)
def batch_norm2d(w: Writer, x: str) -> str:
    """Normalize an image's channels over the batch, and track the statistics in buffers."""
    return f"{w.module(f'nn.BatchNorm2d({w.quarter}, eps=0.1)')}({x})"


@register_block(
    "embedding", options={"layer": LAYER, "gradient": {"dense": None, "sparse": "sparse-embedding"}}
)
def embedding(w: Writer, x: str, *, gradient: str) -> str:
    """Add a looked-up row; its gradient is dense or sparse."""
    # DDP waits for a sparse gradient, even of an unused parameter.
    sparse = gradient == "sparse" and w.reached
    if not sparse:
        w.miss("sparse-embedding")
    layer = w.module(f"nn.Embedding(5, {w.width}{', sparse=True' if sparse else ''})")
    return f"{x} + {layer}({w.input('ids', 'torch.randint(5, (batch,), generator=g)')})"


@register_block(
    "attention", takes="tokens", gives="tokens", options={"layer": LAYER, "causal": (False, True)}
)
def attention(w: Writer, x: str, *, causal: bool) -> str:
    """Attend over the tokens with one projection."""
    layer = w.module(f"nn.Linear({w.half}, {3 * w.half})")
    qkv = f"{layer}({x}).chunk(3, dim=-1)"
    return f"F.scaled_dot_product_attention(*{qkv}{', is_causal=True' if causal else ''})"


@register_block("attention", takes="tokens", gives="tokens", options={"layer": LAYER})
def multihead_attention(w: Writer, x: str) -> str:
    """Attend over the tokens with torch's own module."""
    layer = w.module(f"nn.MultiheadAttention({w.half}, 2, batch_first=True)", weight="in_proj_weight")
    tokens = w.assign("t", x)
    return f"{layer}({tokens}, {tokens}, {tokens}, need_weights=False)[0]"


@register_block(
    "shared-cell", options={"layer": LAYER, "cell": ("RNNCell", "GRUCell", "LSTMCell"), "times": (2, 3)}
)
def recurrence(w: Writer, x: str, *, cell: str, times: int) -> str:
    """Run one cell several times."""
    layer = w.module(f"nn.{cell}({w.width}, {w.width})", weight="weight_hh")
    inputs = w.assign("i", x)
    state = w.local("s")
    w.line(f"{state} = {f'({inputs}, {inputs})' if cell == 'LSTMCell' else inputs}")
    with w.nested(f"for _ in range({times}):"):
        w.line(f"{state} = {layer}({inputs}, {state})")
    return f"{state}[0]" if cell == "LSTMCell" else state
