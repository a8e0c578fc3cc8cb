"""One case for each remaining cap and option that torch's DDPOptimizer buckets otherwise than DDP."""

from functools import partial

from torch import Tensor, nn

from ddpopt.testing.case import Case
from ddpopt.testing.corpus.draws import rows, seeded


class Linears(nn.Module):
    """Linear layers of one width with ReLUs between."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for layer in self.layers:
            x = layer(x).relu()
        return x


def sequential(dim: int, layers: int) -> nn.Sequential:
    """Build linear layers and ReLUs as an ``nn.Sequential``, whose frame Dynamo once skipped under DDP."""
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(dim, dim), nn.ReLU())))


CASES = (
    Case(
        name="linear8",
        model=partial(seeded, Linears, dim=1024, layers=8),
        inputs=partial(rows, batch=32, width=1024),
        about="8 x Linear(1024) at 4 MiB: a bucket holds one layer's bias and the next one's weight",
        ddp_kwargs={"bucket_cap_mb": 4},
    ),
    Case(
        name="cap_below_1",
        model=partial(seeded, Linears, dim=256, layers=16),
        inputs=partial(rows, batch=32, width=256),
        about="a cap of 0.25 MiB, at which torch's optimizer ends in an AssertionError",
        ddp_kwargs={"bucket_cap_mb": 0.25},
    ),
    Case(
        name="cap_5",
        model=partial(seeded, Linears, dim=512, layers=14),
        inputs=partial(rows, batch=32, width=512),
        about="an explicit cap of 5 MiB holds for the first bucket too; torch's optimizer takes 1",
        ddp_kwargs={"bucket_cap_mb": 5},
    ),
    Case(
        name="cap_list",
        model=partial(seeded, Linears, dim=512, layers=10),
        inputs=partial(rows, batch=32, width=512),
        about="bucket_cap_mb_list=[3, 1, 1], of which torch's optimizer uses the largest",
        ddp_kwargs={"bucket_cap_mb_list": [3, 1, 1]},
    ),
    Case(
        name="sequential",
        model=partial(seeded, sequential, dim=384, layers=8),
        inputs=partial(rows, batch=32, width=384),
        about="a bare nn.Sequential under DDP, of which torch compiles no graph (pytorch#140416)",
    ),
)
