"""What other modules ask of a node: its place, its value, and the storage behind it."""

import torch
from torch import fx, nn

from ddpopt.graph.nodes import (
    MISSING,
    module_like,
    requires_grad,
    storages_of,
)


def test_a_value_requires_grad_if_any_tensor_in_it_does() -> None:
    plain, leaf = torch.ones(1), torch.ones(1, requires_grad=True)
    assert requires_grad((plain, [{"x": leaf}]))
    assert not requires_grad((plain, 3, None))
    assert requires_grad(MISSING)


def test_numbers_sparse_tensors_and_functorch_wrappers_have_no_storage_of_ours() -> None:
    found: list[list[int]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(storages_of(x))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 2))
    assert found == [[]]
    assert storages_of((1, None, "x", torch.ones(2, 2).to_sparse())) == []


def test_a_module_made_like_another_keeps_what_aotautograd_looks_for() -> None:
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    gm.meta["dynamo_compile_id"] = "0/0"
    kept = {"_param_name_to_source": {"p": "source"}, "shape_env": "symbols"}
    vars(gm).update(kept)
    made = module_like(gm, fx.Graph())
    assert made.meta == gm.meta
    assert made.meta is not gm.meta
    assert {name: getattr(made, name) for name in kept} == kept
