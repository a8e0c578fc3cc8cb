"""What is wrong with the program itself on many ranks, before any mode is judged.

Ranks that build another model, that fail while their peers go on, or that send something else would hang or
mix up their data in eager DDP, too. Invariant: each finding names the ranks, the first difference, and what
causes it as far as that was seen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.utils._pytree import tree_leaves

from ddpopt.cases.case import Case
from ddpopt.errors import numbered
from ddpopt.judge.rules.failing import Failure, failure_of
from ddpopt.judge.simulation.causes import Line, branch, unlike_inputs
from ddpopt.judge.simulation.sequences import Parting, Sequences
from ddpopt.judge.simulation.world import Sends, World
from ddpopt.judge.training.makeup import makeup
from ddpopt.judge.training.values import PLAIN
from ddpopt.judge.verdict import Finding

EAGER = "eager"
ALIKE = "the same collectives on every rank, in the same order"
SAME_MODEL = "the same parameters and buffers on every rank"
NONE_LEAVES = "no rank fails or ends while the others go on"
SHOWN_NAMES = 4


def unlike_models(case: Case, world: World, sends: Sends) -> tuple[list[Finding], str]:
    """Ranks whose model differs, where making it reads the rank.

    Args:
        case: the case.
        world: the ranks.
        sends: what they send.

    Returns:
        A finding for each way to send something else while it is made, and to have other parameters or
        buffers; and, where models differ only in hooks or attributes, which ranks have others.
    """
    sends.sent.clear()
    with world.noting_reads() as reads:
        first = case.model()
    if not reads:
        return [], ""
    sent = Sequences(world.members)
    sent.add(0, tuple(sends.sent))
    specs = _specs(first)
    makeup_of_first = _makeup(first)
    unlike: dict[str, list[int]] = {}
    otherwise: dict[str, list[int]] = {}
    for rank in range(1, world.size):
        world.become(rank)
        sends.sent.clear()
        model = case.model()
        sent.add(rank, tuple(sends.sent))
        if text := _first_difference(_specs(model), specs):
            unlike.setdefault(text, []).append(rank)
        elif text := _first_difference(_makeup(model), makeup_of_first):
            otherwise.setdefault(text, []).append(rank)
    world.become(0)
    said = [
        Finding("L3", ALIKE, f"while its model is made, {each}", rank=each.ranks[0], ranks=each.ranks)
        for each in sent.partings()
    ]
    said += [
        Finding("L3", SAME_MODEL, f"{numbered('rank', ranks)}: {text}", rank=ranks[0], ranks=tuple(ranks))
        for text, ranks in unlike.items()
    ]
    return said, "; ".join(f"{numbered('rank', ranks)}: {text}" for text, ranks in otherwise.items())


def _first_difference(own: Mapping[str, str], first: Mapping[str, str]) -> str:
    for name in {**first, **own}:
        mine = own.get(name, "missing")
        other = first.get(name, "missing")
        if mine != other:
            return f"{name} is {mine}, on rank 0 {other}"
    return ""


def _specs(model: nn.Module) -> dict[str, str]:
    found = {
        name: f"{parameter.dtype} {tuple(parameter.shape)}{'' if parameter.requires_grad else ', frozen'}"
        for name, parameter in model.named_parameters()
    }
    return found | {name: f"{buffer.dtype} {tuple(buffer.shape)}" for name, buffer in model.named_buffers()}


def _makeup(model: nn.Module) -> dict[str, str]:
    """What else a model is made of: the number of its hooks, and its plain attributes."""
    found = {}
    for what, value in makeup(model).items():
        is_numbered = what.startswith("hooks of")  # by torch, in the order in which hooks are made
        found[what] = f"{len(tree_leaves(value))} in number" if is_numbered else str(value)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, PLAIN):
                place = f"{path}.{name}" if path else name
                found[f"attribute {place}"] = repr(value)
    return found


@dataclass
class Failures:
    """The ranks that failed in one step.

    Attributes:
        size: the number of all ranks.
        of_ranks: how each failed, by rank.
    """

    size: int
    of_ranks: dict[int, Failure] = field(default_factory=dict)

    def add(self, rank: int, error: Exception) -> None:
        """Add the exception of a rank."""
        self.of_ranks[rank] = failure_of(rank, error)

    @property
    def are_of_all(self) -> bool:
        """Whether every rank failed."""
        return len(self.of_ranks) == self.size

    def findings(self, step: int, moment: str = "") -> list[Finding]:
        """What is wrong where only some ranks failed, in a step or at another moment after it."""
        ranks: dict[str, list[int]] = {}
        for rank, failure in self.of_ranks.items():
            ranks.setdefault(failure.text, []).append(rank)
        others = self.size - len(self.of_ranks)
        return [
            Finding(
                "L3",
                NONE_LEAVES,
                f"{moment or f'step {step}'}: {numbered('rank', of)} would fail while {others} others wait: "
                f"{text}",
                rank=of[0],
                ranks=tuple(of),
                step=step,
            )
            for text, of in ranks.items()
        ]


@dataclass(frozen=True)
class Why:
    """Says why two ranks take different ways.

    Attributes:
        world: the ranks.
        case: the case, for their inputs.
        lines: the lines of the program that a rank runs in a step.
    """

    world: World
    case: Case
    lines: Callable[[int, int], Sequence[Line]]

    def branch(self, rank: int, peer: int, step: int) -> list[str]:
        """The line after which two ranks run different lines; none if they run the same."""
        line = branch(self.lines(rank, step), self.lines(peer, step))
        return [f"after {line}, rank {rank} runs other lines than rank {peer}"] if line else []

    def inputs(self, rank: int, peer: int, step: int) -> str:
        """How the inputs of two ranks differ."""
        calls = []
        for each in (rank, peer):
            self.world.become(each)
            calls.append(self.case.inputs(each, step))
        self.world.become(0)
        return f"rank {rank} has {unlike_inputs(*calls)}"


def finding_of(
    parting: Parting,
    step: int,
    *,
    mode: str,
    unused: Mapping[int, Sequence[str]],
    why: Why,
    moment: str = "",
) -> Finding:
    """The finding for ranks that would send something else.

    Args:
        parting: the difference.
        step: index of the step.
        mode: the mode in which it was seen.
        unused: by rank, the parameters that got no gradient.
        why: says why two ranks take different ways.
        moment: when it was seen; by default in the step.
    """
    one = parting.ranks[0]
    peer = parting.peers[0]
    causes = why.branch(one, peer, step)
    for rank, other in ((one, peer), (peer, one)):
        missing = [name for name in unused.get(rank, ()) if name not in unused.get(other, ())]
        if missing:
            more = f" and {len(missing) - SHOWN_NAMES} more" if len(missing) > SHOWN_NAMES else ""
            causes.append(f"rank {rank} has no gradient for {', '.join(missing[:SHOWN_NAMES])}{more}")
    causes.append(why.inputs(one, peer, step))
    where = "" if mode == "eager" else f"in {mode}, not in eager DDP: "
    message = f"{moment or f'step {step}'}: {where}{parting}; {'; '.join(causes)}"
    return Finding("L3", ALIKE, message, rank=one, ranks=parting.ranks, step=step)
