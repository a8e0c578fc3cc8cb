"""What the gate takes for a margin: the worst share of a bound, whatever else a gradient holds."""

import torch

from ddpopt.judge.compare import Sum, communication


def test_an_element_without_a_gradient_does_not_hide_the_one_that_is_closest_to_its_bound() -> None:
    parts = torch.tensor([[1.0, 0.0, 3.0], [2.0**-24, 0.0, 1.0]], dtype=torch.float64)
    terms = Sum(parts.sum(0), parts.abs().sum(0), 2)
    difference = communication(torch.tensor([0.5, 0.0, 2.0]), terms)
    assert difference.right
    assert difference.error == 2.0**-25
    assert 0.1 < difference.error / difference.bound < 1
