"""A mesh of ranks: each row holds one model by tensor parallelism, each column trains copies of a part.

Invariant: outside of a run a case is as it is without a mesh, so that what inspects it needs no ranks.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddpopt.cases.case import Case
from ddpopt.errors import UsageError
from ddpopt.ranks.group import new_group

Sizes = tuple[int, int]
"""The number of copies of the model, and the number of ranks that share each."""


def sizes_of(text: str | None) -> Sizes | None:
    """Read the sizes of a mesh, such as ``2x2``; raises UsageError if the text has another form."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text or "")
    if text is not None and found is None:
        raise UsageError(f"--mesh: expected COPIESxPARTS, such as 2x2, got {text!r}")
    return None if found is None else (int(found[1]), int(found[2]))


def require_parts(case: Case, mesh: Sizes | None) -> None:
    """Check that the ranks of a mesh can share a case's model; raises UsageError if not."""
    given: Any = mesh
    if given is not None and not (isinstance(given, tuple) and [*map(type, given)] == [int, int]):
        raise UsageError(f"mesh: expected (copies, parts), such as (2, 2), got {mesh!r}")
    if mesh is not None and case.parallelize is None:
        raise UsageError(
            f"mesh: expected a case that says how ranks share its model, and {case.name!r} does not; give "
            "its Case the attribute parallelize (tp_mlp and tp_attention of the corpus have it)"
        )


class Grid:
    """This process's place among all ranks, on a mesh or not.

    Args:
        sizes: of the mesh; None if each rank holds the whole model.
        rank: of this process, among all.
        size: the number of all ranks.

    Attributes:
        rank: among the copies of the same part.
        size: the number of these copies.
        columns: the ranks that train copies of each part; None without a mesh.
    """

    def __init__(self, sizes: Sizes | None, rank: int, size: int) -> None:
        parts = 1 if sizes is None else sizes[1]
        if sizes is not None and sizes[0] * parts != size:
            raise UsageError(f"mesh: expected {sizes[0] * parts} ranks for {sizes[0]}x{parts}, got {size}")
        self.rank = rank // parts
        self.size = size // parts
        self._rows = [[*range(row * parts, (row + 1) * parts)] for row in range(self.size)]
        self.columns = None if sizes is None else [[*column] for column in zip(*self._rows, strict=True)]
        self._mesh: DeviceMesh | None = None

    def case(self, case: Case) -> Case:
        """The case, whose models are split between the ranks of a row while the mesh is `laid`."""
        split = case.parallelize
        if self.columns is None or split is None:
            return case

        def made() -> nn.Module:
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform  # heavy

            model = case.model()
            if self._mesh is not None:
                model = split(model, self._mesh["parts"])
                _pre_dp_module_transform(model)
            return model

        return replace(case, model=made)

    @contextlib.contextmanager
    def laid(self, kind: str, group: dist.ProcessGroup, limit_s: float) -> Iterator[None]:
        """A block in which there is a mesh of `group` and of a group for this rank's row."""
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # heavy

        if self.columns is None:
            yield
            return
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it has the groups of the last mesh of these sizes
        row = new_group(limit_s, self._rows)
        self._mesh = DeviceMesh.from_group([group, row], kind, self._rows, mesh_dim_names=("copies", "parts"))
        try:
            yield
        finally:
            self._mesh = None
            with contextlib.suppress(Exception):
                dist.destroy_process_group(row)


def has_parts(model: nn.Module) -> bool:
    """Whether a model has parameters of which other ranks have other parts."""
    return any(hasattr(parameter, "_st_info") for parameter in model.parameters())


def put_back(model: nn.Module) -> None:
    """Give an uncompiled model its local parameters back after each forward, as torch's own hook means to."""
    if has_parts(model):
        held = [(part, {**part._parameters}) for part in model.modules()]
        model.register_forward_hook(functools.partial(_put_back, held))


def _put_back(held: Any, *_: Any) -> None:
    for part, parameters in held:
        for name in parameters.keys() & vars(part).keys():
            delattr(part, name)
        part._parameters = {**parameters}
