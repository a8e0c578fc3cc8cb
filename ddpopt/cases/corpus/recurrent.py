"""Cells called in a loop: one weight read many times, complete only after the first reading's backward."""

from functools import partial

import torch
from torch import Tensor, nn

from ddpopt.cases.corpus.draws import arrays_case


class RNNLoop(nn.Module):
    """An RNN cell in a loop: torch's optimizer counts its weights once per use.

    A linear layer, an ``RNNCell`` over the time steps, and a linear head on the last state.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(dim, dim)
        self.cell = nn.RNNCell(dim, dim)
        self.head = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(time, batch, dim)`` to ``(batch, dim)``."""
        x = self.inputs(x)
        state = torch.zeros_like(x[0])
        for moment in x.unbind(0):
            state = self.cell(moment, state)
        out: Tensor = self.head(state)
        return out


class LSTMLoop(nn.Module):
    """Two alternating LSTM cells: no weight's gradient is complete until backward is nearly done.

    Two stacked ``LSTMCell`` over the time steps, whose states form a tuple, and a head at every step.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lower = nn.LSTMCell(dim, dim)
        self.upper = nn.LSTMCell(dim, dim)
        self.head = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(time, batch, dim)`` to the same shape."""
        lower = upper = (torch.zeros_like(x[0]), torch.zeros_like(x[0]))
        outputs = []
        for moment in x.unbind(0):
            lower = self.lower(moment, lower)
            upper = self.upper(lower[0], upper)
            outputs.append(self.head(upper[0]))
        return torch.stack(outputs)


CASES = (
    arrays_case("rnn_cell", partial(RNNLoop, dim=512), (6, 8, 512)),
    arrays_case("lstm_cell", partial(LSTMLoop, dim=240), (6, 8, 240)),
)
