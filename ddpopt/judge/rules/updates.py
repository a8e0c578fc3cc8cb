"""The effect of rounding on an optimizer's update, for steps whose compiled graph contains the optimizer.

A compiler may leave out roundings between two operations, for example where it uses a fused multiply-add.

Invariant: what is learned comes from the gradients of the run that is judged, so that an error in these is
neither hidden nor found here.
"""

import torch
from torch import Tensor

from ddpopt.cases.option_cases import cast
from ddpopt.judge.rules.arithmetic import Arithmetic, arithmetic_of
from ddpopt.judge.rules.rounding import SAMPLES, neighbor
from ddpopt.judge.training.record import PARAMETER, STATE, Record
from ddpopt.judge.training.updating import Updated, repeated


def rounding_of_updates(record: Record) -> list[dict[str, Arithmetic]]:
    """For each step, the effect of rounding on parameters and the optimizer's state, by the number's name.

    As for other numbers, it is learned from updates of neighboring parameters by neighboring gradients, and
    from one in float64.
    """
    runs = [repeated(record), *(_on_neighbors(record, number) for number in range(1, SAMPLES))]
    wide = repeated(record, lambda tensor: cast(tensor.clone(), torch.float64))
    found = []
    for step, updated in enumerate(wide):
        samples = [_numbers(run[step]) for run in runs]
        truth = _numbers(updated)
        found.append(
            {
                name: arithmetic_of([each[name] for each in samples], truth[name], same_path=True)
                for name in samples[0]
            }
        )
    return found


def _on_neighbors(record: Record, number: int) -> list[Updated]:
    """The updates of numbers that rounding cannot distinguish from those of the run."""
    generator = torch.Generator().manual_seed(number)
    return repeated(record, lambda tensor: neighbor(tensor, generator).clone())


def _numbers(updated: Updated) -> dict[str, Tensor]:
    parameters = {PARAMETER + name: tensor for name, tensor in updated.parameters.items()}
    return parameters | {STATE + name: tensor for name, tensor in updated.state.items()}
