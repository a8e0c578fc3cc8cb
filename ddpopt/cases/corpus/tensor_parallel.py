"""Models whose layers ranks share as in Megatron: the outputs of one layer, and the inputs of the next."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from ddpopt.cases.case import Case
from ddpopt.cases.corpus.decoders import GroupedQueryAttention, Llama, sentences
from ddpopt.cases.corpus.draws import rows_case, seeded
from ddpopt.cases.corpus.layers import FeedForward, residual

COLUMNS = ("up", "gate", "query", "key", "value")
ROWS = ("down", "out")


class FeedForwards(nn.Module):
    """Residual feed-forward layers, and a norm that every rank has whole."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(dim, 4 * dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        normed: Tensor = self.norm(residual(x, self.layers))
        return normed


def split(model: nn.Module, mesh: Any) -> nn.Module:
    """Split linear layers, by their names, and attention heads between the ranks of a mesh."""
    # heavy imports, and few of the corpus's users have a mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, GroupedQueryAttention):
            module.heads, module.kv_heads = module.heads // mesh.size(), module.kv_heads // mesh.size()
        last = name.rpartition(".")[2]
        if last in (*COLUMNS, *ROWS):
            styles[name] = ColwiseParallel() if last in COLUMNS else RowwiseParallel()
    return parallelize_module(model, mesh, styles)


CASES = (
    rows_case(
        "tp_mlp",
        FeedForwards,
        "feed-forward layers that ranks may share by tensor parallelism; DDP reduces the local parts",
        layers=3,
        dim=192,
        parallelize=split,
        ddp_kwargs={"bucket_cap_mb": 0.5},
    ),
    Case(
        name="tp_attention",
        model=partial(seeded, Llama, vocabulary=256, length=16, dim=128, hidden=352, layers=4),
        inputs=partial(sentences, vocabulary=256, batch=4, length=16),
        about="attention and SwiGLU whose heads and columns ranks may share by tensor parallelism",
        parallelize=split,
        ddp_kwargs={"bucket_cap_mb": 0.5},
    ),
)
