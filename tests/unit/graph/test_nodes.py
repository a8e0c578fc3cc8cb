"""What other modules ask of a node: its place, its value, and the storage behind it."""

import torch
from torch import fx, nn

from ddpopt.graph.nodes import (
    MISSING,
    body_nodes,
    example_value,
    fetch,
    module_like,
    requires_grad,
    storages,
    storages_of,
)
from tests.graph_builder import GraphBuilder


def test_the_body_is_what_computes_in_graph_order() -> None:
    builder = GraphBuilder(batch=2, width=4)
    constant = builder.constant(torch.ones(4))
    product = builder.call(torch.mul, builder.x, constant)
    gm = builder.finish(builder.method("relu", product)).gm
    assert [node.op for node in gm.graph.nodes] == [
        "placeholder", "get_attr", "call_function", "call_method", "output",
    ]  # fmt: skip
    assert [node.name for node in body_nodes(gm.graph)] == ["mul", "relu"]


def test_the_example_value_is_dynamos_or_else_aotautograds() -> None:
    node = fx.Graph().placeholder("x")
    assert example_value(node) is MISSING
    node.meta["val"] = 1
    assert example_value(node) == 1
    node.meta["example_value"] = None
    assert example_value(node) is None


def test_an_attribute_is_fetched_by_its_dotted_path() -> None:
    root = nn.Module()
    root.layers = nn.ModuleList([nn.Linear(2, 2)])
    gm = fx.GraphModule(root, fx.Graph())
    gm.layers = root.layers
    assert fetch(gm, "layers.0.weight") is root.layers.get_parameter("0.weight")


def test_a_value_requires_grad_if_any_tensor_in_it_does() -> None:
    plain, leaf = torch.ones(1), torch.ones(1, requires_grad=True)
    assert requires_grad((plain, [{"x": leaf}]))
    assert not requires_grad((plain, 3, None))
    assert requires_grad(MISSING)


def test_views_of_one_tensor_share_their_storage_and_copies_do_not() -> None:
    tensor = torch.ones(4, 4)
    (own,) = storages_of(tensor)
    assert storages_of([tensor.t(), tensor[1:], tensor.detach()]) == [own, own, own]
    assert storages_of(tensor.clone()) != [own]


def test_numbers_sparse_tensors_and_functorch_wrappers_have_no_storage_of_ours() -> None:
    found: list[list[int]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(storages_of(x))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 2))
    assert found == [[]]
    assert storages_of((1, None, "x", torch.ones(2, 2).to_sparse())) == []


def test_the_storages_of_a_node_are_those_of_its_value() -> None:
    node = fx.Graph().placeholder("x")
    assert storages(node) == []
    node.meta["example_value"] = (tensor := torch.ones(2))
    assert storages(node) == storages_of(tensor)


def test_a_module_made_like_another_keeps_what_aotautograd_looks_for() -> None:
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    gm.meta["dynamo_compile_id"] = "0/0"
    kept = {"_param_name_to_source": {"p": "source"}, "shape_env": "symbols"}
    vars(gm).update(kept)
    made = module_like(gm, fx.Graph())
    assert made.meta == gm.meta
    assert made.meta is not gm.meta
    assert {name: getattr(made, name) for name in kept} == kept
