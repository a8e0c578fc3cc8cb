"""Terms are told apart by exact value and type, but for the two ways in which a cut may rewrite a value."""

from typing import Any

import pytest
import torch

from ddpopt.graph.nodes import MISSING
from ddpopt.proof.terms import Group, Held, Item, Made, Term, differences, group, show

TENSOR = torch.ones(2)
EXAMPLES = {
    Made("pair"): (TENSOR, 4),
    Item(Made("pair"), 0): TENSOR,
    Item(Made("pair"), 1): 4,
    Made("three"): 3,
    Made("nested"): ((TENSOR, TENSOR), [TENSOR]),
    Item(Made("nested"), 0): (TENSOR, TENSOR),
    Item(Made("nested"), 1): [TENSOR],
    Made("max"): torch.return_types.max((TENSOR, TENSOR)),
}


FIRST = Item(Made("nested"), 0)


def example(term: Term) -> object:
    return EXAMPLES.get(term, MISSING) if isinstance(term, (Made, Item)) else MISSING


def clauses(expected: Term, found: Term) -> list[str]:
    return list(differences(expected, found, "value", example))


def of(value: Any) -> Term:
    return group(value, lambda leaf: leaf)


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (1, True), (1, 1.0), (0, False), (0.0, -0.0), (None, False), ("1", 1), (b"1", "1"), (1.0, 1 + 0j),
        (torch.float32, torch.float64), (torch.device("cpu"), "cpu"),
        (torch.device("cpu"), torch.device("meta")),
        ((1, 2), [1, 2]), ((1, 2), (1, 2, 3)), ((1, (2,)), (1, (True,))), (slice(0, 1), slice(0, 1, 1)),
        (slice(0, 1), slice(False, 1)), ({"a": 1}, {"b": 1}), ({"a": 1}, {"a": 1.0}), (torch.Size([1]), (1,)),
        (Ellipsis, None), (TENSOR, torch.ones(2)), (range(2), range(3)),
    ],
    ids=str,
)  # fmt: skip
def test_literals_of_another_value_or_type_differ(expected: Any, found: Any) -> None:
    assert len(clauses(of(expected), of(found))) == 1


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (Made("pair"), (Item(Made("pair"), 0), Item(Made("pair"), 1))),
        (Made("pair"), (Item(Made("pair"), 0), 4)),
        (Made("max"), (Item(Made("max"), 0), Item(Made("max"), 1))),
        (Made("nested"), ((Item(FIRST, 0), Item(FIRST, 1)), [Item(Item(Made("nested"), 1), 0)])),
        (Made("three"), 3),
        (Held("a", TENSOR, None), Held("b", TENSOR, None)),
    ],
    ids=["tuple", "tuple with a constant", "named tuple", "nested", "constant", "attribute"],
)
def test_a_value_may_be_spelled_out(expected: Any, found: Any) -> None:
    assert clauses(of(expected), of(found)) == []


def test_a_term_is_shown_as_a_person_would_write_it() -> None:
    term = of((Made("a"), [Item(Made("b"), 1)], {"k": slice(None, 2)}, torch.ones(2, 3), (None,)))
    assert show(term) == "(a, [b[1]], {'k': slice(None, 2, None)}, a tensor of shape (2, 3), (None,))"
    assert isinstance(term, Group)
