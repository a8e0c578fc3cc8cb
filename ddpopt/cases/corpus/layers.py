"""Square linear layers in a row, which many cases are made of.

Invariant: the parameters are ``layers.0.weight``, ``layers.0.bias``, … and are drawn in this order.
"""

from torch import Tensor, nn


class Layers(nn.Module):
    """Square linear layers; what derives from it says how values flow between them."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def halves(self) -> tuple[nn.ModuleList, nn.ModuleList]:
        """Return the layers before the middle, and those after it."""
        half = len(self.layers) // 2
        return self.layers[:half], self.layers[half:]


def residual(x: Tensor, layers: nn.ModuleList) -> Tensor:
    """Add to a stream what each layer makes of it.

    Args:
        x: of shape ``(…, dim)``.
        layers: that map ``dim`` to ``dim``.

    Returns:
        The stream behind the last layer, of the same shape.
    """
    for layer in layers:
        x = x + layer(x).tanh()
    return x
