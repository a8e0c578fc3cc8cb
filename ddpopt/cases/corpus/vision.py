"""Image models: a channels-last ResNet with BatchNorm, and a vision transformer."""

from functools import partial

import torch
from torch import Tensor, nn

from ddpopt.cases.case import Call, Case
from ddpopt.cases.corpus.draws import arrays_case, normal, seeded
from ddpopt.cases.corpus.layers import PreNormBlock


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm, in-place ReLUs, and a shortcut that downsamples where needed."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, inputs, height, width)`` to ``(batch, outputs, height / stride, width / stride)``."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.norm_1(self.conv_1(x)))
        y = self.norm_2(self.conv_2(y))
        y += shortcut
        out: Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    """A stem, three stages of residual blocks, and a linear head over the mean of the last map."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
        )
        blocks: list[nn.Module] = []
        for stage, width in enumerate(widths):
            before = widths[max(stage - 1, 0)]
            blocks += [ResidualBlock(before, width, 1 if stage == 0 else 2), ResidualBlock(width, width, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(batch, 3, height, width)`` to logits ``(batch, classes)``."""
        logits: Tensor = self.head(torch.flatten(self.pool(self.blocks(self.stem(images))), 1))
        return logits


class ViT(nn.Module):
    """Vision transformer: a patch convolution, and parameters that are added and concatenated.

    The convolution cuts the image in patches; a learned token before them carries the answer.
    """

    def __init__(self, side: int, patch: int, dim: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(PreNormBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(batch, 3, side, side)`` to logits ``(batch, classes)``."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


def channels_last_resnet() -> nn.Module:
    """Build the ResNet with its weights, hence its gradients, in channels-last order."""
    model = ResNet(widths=(32, 64, 160), classes=10)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]  # not in stubs


def channels_last_images(rank: int, step: int) -> Call:
    """Draw four images of 16 x 16 in channels-last order."""
    return (normal(rank, step, 4, 3, 16, 16).to(memory_format=torch.channels_last),), {}


CASES = (
    Case(
        name="resnet",
        model=partial(seeded, channels_last_resnet),
        inputs=channels_last_images,
        about="channels-last convolutions with BatchNorm, in-place ReLU and downsampling shortcuts",
    ),
    arrays_case(
        "vit", partial(ViT, side=16, patch=4, dim=128, heads=4, layers=5, classes=10), (8, 3, 16, 16)
    ),
)
