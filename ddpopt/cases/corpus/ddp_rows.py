"""One case for each remaining cap and option that torch's DDPOptimizer buckets otherwise than DDP."""

from functools import partial

from torch import Tensor, nn

from ddpopt.cases.case import Case
from ddpopt.cases.corpus.draws import rows, seeded
from ddpopt.cases.corpus.layers import Layers
from ddpopt.cases.report_of_case import Report


class Linears(Layers):
    """Linear layers of one width with ReLUs between."""

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
        report=Report(
            number=108966,
            upstream="graph breaks follow DDP's buckets, so a smaller cap costs fusion and a larger one "
            "overlap",
            torch_passes=False,
            torch_says="compiles 8 pieces, sends 7 of 9 buckets during backward, gradients as eager",
            asks=("one piece", "overlap"),
        ),
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
        report=Report(
            number=121640,
            upstream="with an explicit cap DDP now gives its first bucket that cap; the optimizer still "
            "splits off 1 MiB",
            torch_passes=True,
            torch_says="compiles 4 pieces, sends 2 of 3 buckets during backward, gradients as eager",
            asks=("aligned",),
        ),
    ),
    Case(
        name="cap_list",
        model=partial(seeded, Linears, dim=512, layers=10),
        inputs=partial(rows, batch=32, width=512),
        about="bucket_cap_mb_list=[3, 1, 1], of which torch's optimizer uses the largest",
        ddp_kwargs={"bucket_cap_mb_list": [3, 1, 1]},
        report=Report(
            number=169026,
            upstream="DDP takes a list of caps, one for each bucket; the optimizer knows one cap",
            torch_passes=False,
            torch_says="compiles 4 pieces, sends 5 of 9 buckets during backward, gradients as eager",
            asks=("aligned",),
        ),
    ),
    Case(
        name="sequential",
        model=partial(seeded, sequential, dim=384, layers=8),
        inputs=partial(rows, batch=32, width=384),
        about="a bare nn.Sequential under DDP, of which torch compiles no graph (pytorch#140416)",
        report=Report(
            number=140416,
            upstream="the backend was never called for a bare nn.Sequential under DDP",
            torch_passes=False,
            torch_says="compiles nothing, sends 0 of 4 buckets during backward, gradients as eager",
            asks=("compiled",),
        ),
    ),
)
