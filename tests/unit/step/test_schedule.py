"""The order of a step's operations."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ddpopt.graph.nodes import body_nodes
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
