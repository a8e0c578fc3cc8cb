"""Parameters read in several places, and parameters read nowhere, frozen, or none of DDP's business."""

from functools import partial

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.cases.case import Case
from ddpopt.cases.corpus.draws import rows, seeded
from ddpopt.cases.report_of_case import Report


class Residuals(nn.Module):
    """Linear layers, each added to the stream; ``order`` says which run when, each once if not given."""

    def __init__(self, dim: int, layers: int, order: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.order = order or tuple(range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for index in self.order:
            x = x + self.layers[index](x).relu()
        return x


def tied(dim: int, layers: int) -> nn.Module:
    """Build layers of which the first and the last share a weight but not a bias."""
    model = Residuals(dim, layers)
    model.layers[-1].weight = model.layers[0].weight
    return model


def shared_module(dim: int, layers: int) -> nn.Module:
    """Build layers of which the second and the last are one module under two names."""
    model = Residuals(dim, layers)
    model.layers[-1] = model.layers[1]
    return model


def frozen(dim: int, layers: int) -> nn.Module:
    """Build layers of which every third, the first included, is frozen."""
    model = Residuals(dim, layers)
    for index in range(0, layers, 3):
        model.layers[index].requires_grad_(False)
    return model


def ignored(dim: int, layers: int) -> nn.Module:
    """Build layers of which two are marked as none of DDP's business: their gradients stay local."""
    model = Residuals(dim, layers)
    names = [f"layers.{index}.{kind}" for index in (2, 5) for kind in ("weight", "bias")]
    # The only way that DDP offers, underscore and all; in torch 2.11 to 2.13 it has no annotations.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
    return model


CASES = (
    Case(
        name="tied",
        model=partial(seeded, tied, dim=384, layers=8),
        inputs=partial(rows, batch=32, width=384),
        about="first and last layer share a weight, which is complete last",
    ),
    Case(
        name="shared_module",
        model=partial(seeded, shared_module, dim=384, layers=9),
        inputs=partial(rows, batch=32, width=384),
        about="one module under two names, of which parameters have only the first",
    ),
    Case(
        name="called_twice",
        model=partial(seeded, Residuals, dim=384, layers=8, order=(0, 1, 2, 3, 1, 4, 5, 6, 7, 3)),
        inputs=partial(rows, batch=32, width=384),
        about="two modules that run twice each, with others between",
        report=Report(
            number=147123,
            upstream="the python_reducer setting silently fell back where forward was not compiled; now it "
            "always holds",
            torch_passes=False,
            torch_says="compiles 1 piece, sends 0 of 16 buckets during backward, gradients as eager",
            asks=("overlap",),
            settings={"_dynamo.optimize_ddp": "python_reducer"},
            nearest="backward is not captured by compiled autograd, so each gradient is reduced alone",
        ),
    ),
    Case(
        name="frozen",
        model=partial(seeded, frozen, dim=384, layers=11),
        inputs=partial(rows, batch=32, width=384),
        about="frozen layers among trainable ones: they stand in no bucket",
    ),
    Case(
        name="ignored",
        model=partial(seeded, ignored, dim=384, layers=10),
        inputs=partial(rows, batch=32, width=384),
        about="parameters that DDP is told to ignore: trainable, read, but in no bucket and not reduced",
        tags=("ignored",),
        report=Report(
            number=88460,
            upstream="ignored parameters were counted; they are now known by a mark, which Dynamo's inputs "
            "do not carry",
            torch_passes=True,
            torch_says="compiles 5 pieces, sends 3 of 5 buckets during backward, gradients as eager",
        ),
    ),
    Case(
        name="unused",
        model=partial(seeded, Residuals, dim=384, layers=9, order=(0, 1, 3, 4, 5, 6, 7, 8)),
        inputs=partial(rows, batch=32, width=384),
        about="a layer that never runs: in a bucket, in no graph",
        ddp_kwargs={"find_unused_parameters": True},
        tags=("unused",),
        unused=("layers.2.weight", "layers.2.bias"),
        report=Report(
            number=113809,
            upstream="CUDA graphs and _DDPSink ran in two threads of autograd at once: assertions failed",
            torch_passes=True,
            torch_says="compiles 4 pieces, sends 3 of 5 buckets during backward, gradients as eager",
            nearest="CUDA graphs need a GPU; what stays is the sink between DDP and the compiled graph",
        ),
    ),
    Case(
        name="unused_static",
        model=partial(seeded, Residuals, dim=384, layers=9, order=(0, 1, 3, 4, 5, 6, 7, 8)),
        inputs=partial(rows, batch=32, width=384),
        about="a layer that never runs, under static_graph, which finds out in the first iteration",
        ddp_kwargs={"static_graph": True},
        tags=("unused",),
        unused=("layers.2.weight", "layers.2.bias"),
        report=Report(
            number=93672,
            upstream="static_graph had to be off under Dynamo: the tracing run was taken for the first "
            "iteration",
            torch_passes=True,
            torch_says="compiles 4 pieces, sends 3 of 5 buckets during backward, gradients as eager",
        ),
    ),
)
