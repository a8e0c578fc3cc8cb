"""What a run of a module leaves behind, for comparison bit for bit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.support.snippets import copied


class Effects:
    """All that a run of a module leaves behind, for comparison bit for bit."""

    def __init__(self, run: Callable[..., Any], inputs: list[Any]) -> None:
        given = list(map(copied, inputs))
        torch.manual_seed(0)
        self.outputs = pytree.tree_leaves(run(*given))
        self.generator = torch.random.get_rng_state()
        real = (torch.view_as_real(t) if t.is_complex() else t for t in self.outputs if isinstance(t, Tensor))
        losses = [t.float().square().sum() for t in real if t.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]  # of torch
        self.inputs = given
        self.gradients = [v.grad if isinstance(v, Tensor) and v.is_leaf else None for v in given]

    def assert_equal(self, other: "Effects") -> None:
        assert torch.equal(self.generator, other.generator)
        for name in ("outputs", "inputs", "gradients"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            assert [place for place, pair in enumerate(pairs) if not identical(*pair)] == [], name


def identical(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return bool(left == right)
    layouts = [(t.dtype, t.shape, t.stride(), t.requires_grad, t.is_conj()) for t in (left, right)]
    return layouts[0] == layouts[1] and torch.equal(left, right)
