"""One case for each other cap and option for which torch's DDPOptimizer and DDP disagree on buckets."""

from torch import Tensor, nn

from ddpopt.cases.corpus.draws import rows_case
from ddpopt.cases.corpus.layers import Layers


class Linears(Layers):
    """Linear layers of one width with ReLUs between."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for layer in self.layers:
            x = layer(x).relu()
        return x


def sequential(dim: int, layers: int) -> nn.Sequential:
    """A bare nn.Sequential under DDP, for which torch compiles no graph (pytorch#140416).

    Returns:
        Linear layers and ReLUs; Dynamo once skipped the frame of such a module under DDP.
    """
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(dim, dim), nn.ReLU())))


CASES = (
    rows_case(
        "linear8",
        Linears,
        "8 x Linear(1024) at 4 MiB: a bucket holds one layer's bias and the next one's weight",
        dim=1024,
        ddp_kwargs={"bucket_cap_mb": 4},
    ),
    rows_case(
        "cap_below_1",
        Linears,
        "a cap of 0.25 MiB, with which torch's optimizer raises an AssertionError",
        layers=16,
        dim=256,
        ddp_kwargs={"bucket_cap_mb": 0.25},
    ),
    rows_case(
        "cap_5",
        Linears,
        "an explicit cap of 5 MiB also applies to the first bucket; torch's optimizer uses 1 MiB",
        layers=14,
        dim=512,
        ddp_kwargs={"bucket_cap_mb": 5},
    ),
    rows_case(
        "cap_list",
        Linears,
        "bucket_cap_mb_list=[3, 1, 1], of which torch's optimizer uses the largest",
        layers=10,
        dim=512,
        ddp_kwargs={"bucket_cap_mb_list": [3, 1, 1]},
    ),
    rows_case("sequential", sequential),
)
