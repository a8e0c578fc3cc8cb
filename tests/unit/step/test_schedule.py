"""The order of a step's operations, and numbers that become tensors."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ddpopt.errors import UnsupportedError
from ddpopt.graph.nodes import body_nodes
from ddpopt.graph.numbers import numbers_as_tensors
from ddpopt.step.schedule import WAIT, Schedule

aten: Any = torch.ops.aten
ALL_REDUCE: Any = torch.ops._c10d_functional.all_reduce.default


def sent(value: Tensor, collective: Any = ALL_REDUCE, how: object = "sum") -> Any:
    return torch.ops._c10d_functional.wait_tensor(collective(value, how, "0"))


def bucket(*parts: Tensor) -> Any:
    one, other = sent(torch.cat([part * 0.5 for part in parts])).flatten().split(SIZE)
    return (one - other).float()


SIZE = 3
KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "compute": torch.sub,
    "random": lambda a, _: torch.rand_like(a),
    "write": lambda a, b: a.add_(b),
    "part": lambda a, _: a[1:].add_(1),
    "send": lambda a, _: sent(a),
    "gather": lambda a, _: sent(a, torch.ops._c10d_functional.all_gather_into_tensor.default, 1),
    "bucket": bucket,
    "of two dtypes": lambda a, b: bucket(a, b.double() / 3),
    "of two dimensions": lambda a, b: bucket(a[:, None], b[:, None]),
}
places = st.integers(0, 20)
programs = st.sampled_from([[*KINDS], ["compute", "send"]]).flatmap(
    lambda kinds: st.lists(st.tuples(st.sampled_from(kinds), places, places), max_size=12)
)


def assert_early_starts_and_late_waits(nodes: list[fx.Node], starts: list[fx.Node]) -> None:
    """A collective follows only what it or an earlier one needs; what waits for earlier ones comes first."""
    needs: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        needs[node] = {node}.union(*(needs.get(each, set()) for each in node.all_input_nodes))
    for number, start in enumerate(starts):
        needed = set[fx.Node]().union(*(needs[each] for each in starts[: number + 1]))
        assert needed == {*nodes[: nodes.index(start) + 1]}
    rest = nodes[nodes.index(starts[-1]) + 1 :] if starts else nodes
    waited = [max([-1, *map(starts.index, needs[node] & {*starts})]) for node in rest]
    assert waited == sorted(waited)


@given(programs)
def test_the_program_is_the_same_and_its_collectives_start_early(steps: list[tuple[str, int, int]]) -> None:
    def program(*given: Tensor) -> list[Tensor]:
        known = [*given]
        for kind, one, other in steps:
            value = KINDS[kind](known[one % len(known)], known[other % len(known)])
            known += [value] if len(value) == SIZE else []
        return known

    runs = []
    for changes in (False, True):
        gm: Any = make_fx(program, tracing_mode="fake")(torch.ones(SIZE), torch.ones(SIZE))
        nodes = body_nodes(gm.graph)
        if changes:
            Schedule()(gm.graph)
            nodes, kinds = body_nodes(gm.graph), [kind for kind, _, _ in steps]
            copies: list[Any] = [each for each in nodes if each.target is aten.copy_.default]
            assert all(copy.args[0].prev in (copy.args[0].args[0], copy.args[1]) for copy in copies)
            assert len(copies) == 2 * kinds.count("bucket")
        starts = [each for each in nodes if "c10d" in str(each.target) and each.target is not WAIT]
        if changes and {*kinds} <= {"compute", "send"}:
            assert_early_starts_and_late_waits(nodes, starts)
        for node in starts:  # on one rank
            node.target, node.args = aten.clone.default, node.args[:1]
            next(iter(node.users)).target = aten.alias.default
        gm.recompile()
        torch.manual_seed(0)
        inputs = torch.arange(3.0), torch.ones(SIZE)
        runs.append(([node.name for node in starts], [*gm(*inputs), *inputs]))
    (order, expected), (new_order, found) = runs
    assert new_order == order
    assert all(map(torch.equal, found, expected))


OPERATIONS: dict[str, Callable[[float, Tensor, Tensor], Any]] = {
    "mul": lambda rate, a, b: a * rate * 0.1 + b,
    "div": lambda rate, a, b: a / rate - b,
    "rsub": lambda rate, a, b: (rate - a) * b,
    "pow": lambda rate, a, b: (a**rate, rate**b),
    "clamp": lambda rate, a, _: torch.where(a > rate, a, rate),
    "masked": lambda rate, a, b: a.masked_fill(a < b, rate),
    "alpha, in place": lambda rate, a, b: a.clone().sub_(b, alpha=rate),
    "addcdiv": lambda rate, a, b: a.addcdiv(b, a, value=rate),
    "addcmul, in place": lambda rate, a, b: a.clone().addcmul_(b, a, value=rate),
    "lerp, in place": lambda rate, a, b: a.clone().lerp_(b, 1 - rate),
    "full": lambda rate, a, b: (torch.full_like(a, rate) + b, torch.full((2,), rate), torch.tensor(rate)),
    "new full": lambda rate, a, _: a.new_full((2,), rate),
    "functions": lambda rate, a, _: a * math.sqrt(rate) * round(rate, 1) * min(rate, 0.2) * max(0.1, rate),
    "integers": lambda rate, a, _: (
        a * int(rate * 10) + math.floor(rate * 20) + round(rate) + float(rate // 0.2)
    ),
    "foreach": lambda rate, a, b: torch._foreach_mul([a, b], rate),
    "foreach, in place": lambda rate, a, b: in_place(torch._foreach_add_, a, b, alpha=rate),
    "foreach lerp": lambda rate, a, b: in_place(torch._foreach_lerp_, a, b, weight=rate),
    "foreach addcdiv": lambda rate, a, b: in_place(torch._foreach_addcdiv_, a, b, [a + 1], value=rate),
    "foreach pow": lambda rate, a, b: torch._foreach_pow([a, b], rate),
}


def in_place(operation: Any, a: Tensor, b: Tensor, *more: Any, **given: Any) -> Tensor:
    written = a.clone()
    operation([written], [b], *more, **given)
    return written


@pytest.mark.parametrize("form", [(torch.float32, (3,)), (torch.float32, ()), (torch.bfloat16, (2, 2))])
@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_become_tensors_and_the_graph_computes_the_same(name: str, form: Any) -> None:
    def step(given: Tensor, a: Tensor, b: Tensor) -> Any:
        return OPERATIONS[name](given.item(), a, b)

    dtype, shape = form
    torch.manual_seed(0)
    inputs = torch.tensor(0.3, dtype=torch.float64), *(torch.rand(2, *shape) + 0.5).to(dtype)
    gm = make_fx(step, tracing_mode="symbolic")(*inputs)
    numbers_as_tensors(gm)
    gm.graph.lint()
    assert not gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    torch.testing.assert_close(gm(*inputs), step(*inputs))


def test_an_operation_that_takes_numbers_only_says_what_to_do() -> None:
    gm = make_fx(lambda rate, a: torch.nn.functional.leaky_relu(a, rate.item()), tracing_mode="symbolic")(
        torch.tensor(0.3, dtype=torch.float64), torch.rand(3)
    )
    numbers_as_tensors(gm)
    with pytest.raises(UnsupportedError, match=r"leaky_relu.* takes a number that changes.*make the num"):
        gm(torch.tensor(0.3, dtype=torch.float64), torch.rand(3))
