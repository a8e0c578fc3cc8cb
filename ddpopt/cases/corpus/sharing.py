"""Parameters read in several places, and parameters read nowhere, frozen, or ignored by DDP."""

from functools import partial

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.cases.corpus.draws import rows_case
from ddpopt.cases.corpus.layers import Layers


class Residuals(Layers):
    """Linear layers, each added to the stream; ``order`` says which run when, each once if not given."""

    def __init__(self, dim: int, layers: int, order: tuple[int, ...] = ()) -> None:
        super().__init__(dim, layers)
        self.order = order or tuple(range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for index in self.order:
            x = x + self.layers[index](x).relu()
        return x


def tied(dim: int, layers: int) -> nn.Module:
    """Build layers whose first and last share a weight but not a bias."""
    model = Residuals(dim, layers)
    model.layers[-1].weight = model.layers[0].weight
    return model


def shared_module(dim: int, layers: int) -> nn.Module:
    """One module under two names; its parameters are listed only under the first.

    Returns:
        Layers whose second and last are that module.
    """
    model = Residuals(dim, layers)
    model.layers[-1] = model.layers[1]
    return model


def frozen(dim: int, layers: int) -> nn.Module:
    """Build layers with every third one frozen, including the first."""
    model = Residuals(dim, layers)
    for index in range(0, layers, 3):
        model.layers[index].requires_grad_(False)
    return model


def ignored(dim: int, layers: int) -> nn.Module:
    """Parameters that DDP is told to ignore: trainable, read, but in no bucket and not reduced.

    Returns:
        Layers, two of which have such parameters, whose gradients stay local.
    """
    model = Residuals(dim, layers)
    names = [f"layers.{index}.{kind}" for index in (2, 5) for kind in ("weight", "bias")]
    # DDP offers no other way, despite the underscore; it has no annotations.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
    return model


CASES = (
    rows_case("tied", tied, "first and last layer share a weight, whose gradient is complete last"),
    rows_case("shared_module", shared_module, layers=9),
    rows_case(
        "called_twice",
        partial(Residuals, order=(0, 1, 2, 3, 1, 4, 5, 6, 7, 3)),
        "two modules that run twice each, with others between",
    ),
    rows_case("frozen", frozen, "frozen layers among trainable ones: they are in no bucket", layers=11),
    rows_case("ignored", ignored, layers=10),
    rows_case(
        "unused",
        partial(Residuals, order=(0, 1, 3, 4, 5, 6, 7, 8)),
        "a layer that never runs: in a bucket, in no graph",
        layers=9,
        ddp_kwargs={"find_unused_parameters": True},
        unused=("layers.2.weight", "layers.2.bias"),
    ),
    rows_case(
        "unused_static",
        partial(Residuals, order=(0, 1, 3, 4, 5, 6, 7, 8)),
        "a layer that never runs, under static_graph, which finds out in the first iteration",
        layers=9,
        ddp_kwargs={"static_graph": True},
        unused=("layers.2.weight", "layers.2.bias"),
    ),
)
