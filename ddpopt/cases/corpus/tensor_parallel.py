"""Models whose layers ranks share as in Megatron: the outputs of one layer, and the inputs of the next."""

from functools import partial
from typing import Any

from torch import nn

from ddpopt.cases.case import Case
from ddpopt.cases.corpus.ddp_rows import Linears
from ddpopt.cases.corpus.decoders import GroupedQueryAttention, Llama, sentences
from ddpopt.cases.corpus.draws import rows_case, seeded


def split(model: nn.Module, mesh: Any) -> nn.Module:
    """Split pairs of linear layers, and attention heads, between the ranks of a mesh."""
    # heavy imports, and few of the corpus's users have a mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles: dict[str, Any] = {}
    first = ColwiseParallel(use_local_output=not isinstance(model, Linears))  # they pass DTensors on
    for name, module in model.named_modules():
        if isinstance(module, GroupedQueryAttention):
            module.heads //= mesh.size()
            module.kv_heads //= mesh.size()
        if isinstance(module, nn.Linear) and not name.endswith("head"):
            # these are the second of a pair
            styles[name] = RowwiseParallel() if name.endswith(("down", "out", *"1357")) else first
    return parallelize_module(model, mesh, styles)


CASES = (
    rows_case(
        "tp_mlp",
        Linears,
        "pairs of linear layers that ranks may share by tensor parallelism; DDP reduces the local parts",
        parallelize=split,
        ddp_kwargs={"bucket_cap_mb": 0.5},
    ),
    Case(
        "tp_attention",
        partial(seeded, Llama, vocabulary=256, length=16, dim=128, hidden=352, layers=4),
        partial(sentences, vocabulary=256, batch=4, length=16),
        "attention and SwiGLU whose heads and columns ranks may share by tensor parallelism",
        parallelize=split,
        ddp_kwargs={"bucket_cap_mb": 0.5},
    ),
)
