"""What a mode is held against: eager DDP under the same option, and what its rounding looks like.

Invariant: every collective of a reference is one that all ranks take part in, whatever failed on some: errors
are exchanged before anything else is.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from ddpopt.errors import DdpoptError
from ddpopt.testing.case import Case
from ddpopt.verify.compare import (
    Arithmetic,
    Difference,
    Sum,
    arithmetic_of,
    bitwise,
    communication,
    exact,
    unit_roundoff,
)
from ddpopt.verify.modes import LOCAL, Mode, mode
from ddpopt.verify.option_cases import in_dtype
from ddpopt.verify.options import Option
from ddpopt.verify.parallel import Gradients, Named
from ddpopt.verify.ranks import Ranks
from ddpopt.verify.structure import Peer, peer_of
from ddpopt.verify.training import Course, Place, Record, train

COLLECTIVE_LIMIT_S = 20.0
SAMPLES = 8
"""Eager steps from which eager's rounding is learned: one as it is, the others perturbed."""
LOST = ("Connection closed by peer", "Connection reset by peer", "Timed out", "timed out", "Broken pipe")
"""What gloo says where a peer is gone."""


@dataclass(frozen=True)
class Failure:
    """An exception on one rank.

    Attributes:
        rank: where.
        text: its type and message, and the innermost frame.
        refused: whether it is an error that ddpopt raised on purpose.
        lost: whether it only says that a peer is gone.
    """

    rank: int
    text: str
    refused: bool
    lost: bool


@dataclass(frozen=True)
class Subject:
    """What is verified.

    Attributes:
        case: the case.
        option: how DDP is used.
        steps: how many steps are taken.
        device: where.
    """

    case: Case
    option: Option
    steps: int
    device: torch.device

    @functools.cached_property
    def adapted(self) -> Case:
        """The case as the option changes it."""
        return self.option.adapt(self.case)


class Bench:
    """Where one subject is run: on these ranks, each run with a process group of its own."""

    def __init__(self, subject: Subject, ranks: Ranks) -> None:
        self.subject = subject
        self.ranks = ranks
        self.members = subject.option.groups(ranks.size)
        self.group_ranks = next(group for group in self.members if ranks.rank in group)
        self.rank = self.group_ranks.index(ranks.rank)
        self.size = len(self.group_ranks)
        self.calm = self._new_group()
        self.failures: list[Failure] = []

    def close(self) -> None:
        """Give the comparison's own process group back."""
        dist.destroy_process_group(self.calm)

    def run(self, how: Mode, backend: Any, **more: Any) -> Record | None:
        """Train in a mode.

        Args:
            how: the mode.
            backend: Dynamo's.
            more: for `ddpopt.verify.training.Course`, whose case may be another one.

        Returns:
            What happened; None if it failed on any rank: `failures` then says on which, and how.
        """
        subject = self.subject
        adapted = more.pop("case", None) or subject.adapted
        course = Course(
            adapted,
            subject.option.program,
            backend,
            functools.partial(subject.option.arguments, adapted),
            subject.steps,
            **more,
        )
        record, failure = None, None
        with _detail(subject.option.detail), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            group = self._new_group()
            try:
                record = train(course, how, Place(self.rank, self.size, group, subject.device))
            except Exception as error:
                failure = _failure(self.ranks.rank, error)
            finally:
                # Peers that wait for a rank that failed learn of it from their closed connections.
                with contextlib.suppress(Exception):
                    dist.destroy_process_group(group)
        self.failures = [other for other in self.ranks.gather(failure) if other is not None]
        return None if self.failures else record

    def peers(self, record: Record) -> list[Peer]:
        """Every rank's summary of a run, in the group that trains together."""
        found = self.ranks.gather((self.members.index(self.group_ranks), peer_of(self.rank, record)))
        own = self.members.index(self.group_ranks)
        return [peer for group, peer in found if group == own]

    def sums(self, gradients: Gradients) -> dict[str, Sum]:
        """What the ranks of this group contribute to each gradient."""
        present = [(name, gradient) for name, gradient in gradients.items()]
        shapes = self._shapes(present)
        total = _flat([(shapes[name], gradient) for name, gradient in present])
        magnitude = total.abs()
        for tensor in (total, magnitude):
            dist.all_reduce(tensor, group=self.calm)
        found, place = {}, 0
        for name, _ in present:
            count = shapes[name].numel()
            part = slice(place, place + count)
            found[name] = Sum(total[part].view(shapes[name]), magnitude[part].view(shapes[name]), self.size)
            place += count
        return found

    def _shapes(self, named: Sequence[tuple[str, Tensor | None]]) -> dict[str, torch.Size]:
        """The shape of each gradient in real numbers, where some rank has it."""
        own = {name: tuple(exact(gradient).shape) for name, gradient in named if gradient is not None}
        known: dict[str, Any] = {}
        for other in self.ranks.gather(own):
            known = {**other, **known}
        return {name: torch.Size(known.get(name, (0,))) for name, _ in named}

    def _new_group(self) -> dist.ProcessGroup:
        limit = timedelta(seconds=COLLECTIVE_LIMIT_S)
        groups = [dist.new_group(members, timeout=limit) for members in self.members]
        own: dist.ProcessGroup = groups[self.members.index(self.group_ranks)]
        return own


def _flat(parts: Sequence[tuple[torch.Size, Tensor | None]]) -> Tensor:
    values = [
        torch.zeros(shape, dtype=torch.float64) if tensor is None else exact(tensor).cpu()
        for shape, tensor in parts
    ]
    return torch.cat([value.flatten() for value in values]) if values else torch.zeros(0, dtype=torch.float64)


@contextlib.contextmanager
def _detail(wanted: bool) -> Iterator[None]:
    """Have c10d check each collective on all ranks, for groups that are made inside."""
    if not wanted:
        yield
        return
    c10d: Any = dist  # torch does not mark its re-exports
    before = c10d.get_debug_level()
    c10d.set_debug_level(c10d.DebugLevel.DETAIL)
    try:
        yield
    finally:
        c10d.set_debug_level(before)


def _failure(rank: int, error: Exception) -> Failure:
    words = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    text = f"{type(error).__name__}: {' '.join(words)[:400]}{where}"
    return Failure(rank, text, isinstance(error, DdpoptError), any(word in str(error) for word in LOST))


class Reference:
    """Eager DDP's run of a subject, and all that is derived from it.

    Attributes:
        bench: where it ran.
        eager: its record.
        again: the record of the same once more.
        unstable: names of what was not the same once more, with the operation that is to blame.
        sums: for each step what the ranks contribute to each gradient; None where the reduced gradient is
            no mean of what the model alone computes, or the model alone fails.
        alone: the model's own run on this rank, from the states of the eager run.
    """

    def __init__(self, bench: Bench, eager: Record, again: Record) -> None:
        self.bench = bench
        self.eager = eager
        self.again = again
        self.unstable: dict[str, str] = {}
        self.alone: Record | None = None
        self.sums: list[dict[str, Sum]] | None = None
        self._reductions: dict[tuple[int, str], Difference] = {}
        self.eager_peers = bench.peers(eager)

    @classmethod
    def make(cls, bench: Bench) -> Reference | None:
        """Run eager DDP twice, and the model alone.

        Returns:
            The reference; None if eager DDP fails here: `bench.failures` says how.
        """
        eager = bench.run(mode("eager"), None)
        if eager is None:
            return None
        again = bench.run(mode("eager"), None)
        if again is None:
            return None
        made = cls(bench, eager, again)
        made._find_unstable()
        made._run_alone()
        return made

    def _find_unstable(self) -> None:
        own: set[str] = set()
        for left, right in zip(self.eager.steps, self.again.steps, strict=False):
            for one, two in ((left.gradients, right.gradients), (left.state, right.state)):
                own |= {name for name in one if not _same(one[name], two.get(name))}
        names = sorted(set().union(*self.bench.ranks.gather(own)))
        if names:
            from ddpopt.verify.determinism import blame

            bench = self.bench
            culprit = blame(bench.subject.adapted, bench.rank, bench.subject.device)
            self.unstable = dict.fromkeys(names, culprit)

    def _run_alone(self) -> None:
        option = self.bench.subject.option
        if not option.local:
            return
        self.alone = self.bench.run(LOCAL, None, follow=self.eager.starts)
        if self.alone is not None:
            self.sums = [self.bench.sums(step.gradients) for step in self.alone.steps]

    def reduction(self, step: int, name: str) -> Difference | None:
        """L1 of eager's own gradient; None where that is not asked for."""
        if self.sums is None or name not in self.sums[step]:
            return None
        if (step, name) not in self._reductions:
            gradient, option = self.eager.steps[step].gradients[name], self.bench.subject.option
            if gradient is None:
                return None
            self._reductions[step, name] = reduced(gradient, self.sums[step][name], option.comm_dtype)
        return self._reductions[step, name]

    @functools.cached_property
    def graphs(self) -> list[int] | None:
        """How many graphs Dynamo makes of the model alone, after each step; None if it fails."""
        record = self.bench.run(LOCAL, "eager", follow=self.eager.starts)
        return None if record is None else record.graphs_after

    @functools.cached_property
    def arithmetic(self) -> list[dict[str, Arithmetic]]:
        """For each step what eager's rounding does to each gradient, the loss, and each buffer."""
        bench, eager = self.bench, self.eager
        case = bench.subject.adapted
        runs = [eager]
        for number in range(1, SAMPLES):
            computes = bench.subject.option.computes
            follow = [_perturbed_state(state, number, computes) for state in eager.starts]
            run = bench.run(mode("eager"), None, case=_perturbed(case, number, computes), follow=follow)
            if run is not None:
                runs.append(run)
        follow = [{name: _widened(t) for name, t in state.items()} for state in eager.starts]
        truth = bench.run(mode("eager"), None, case=in_dtype(case, torch.float64), follow=follow)
        return [
            _arithmetics([values(run, step) for run in runs], None if truth is None else values(truth, step))
            for step in range(len(eager.steps))
        ]


def reduced(gradient: Tensor, terms: Sum, sent_as: torch.dtype | None) -> Difference:
    """L1 of a gradient that was sent in its own dtype, or was converted to another one and back."""
    return communication(gradient, terms, sent_as, casts=0 if sent_as is None else 2)


def values(record: Record, step: int) -> dict[str, Tensor]:
    """All numbers that one step leaves behind and that compiled code computes: gradients, loss, buffers."""
    one = record.steps[step]
    found = {name: gradient for name, gradient in one.gradients.items() if gradient is not None}
    found["the loss"] = one.loss
    buffers = {f"buffer {name}": t for name, t in one.state.items() if name not in one.gradients}
    return found | {name: t for name, t in buffers.items() if t.is_floating_point() or t.is_complex()}


def _arithmetics(
    samples: Sequence[dict[str, Tensor]], truth: dict[str, Tensor] | None
) -> dict[str, Arithmetic]:
    found = {}
    for name, first in samples[0].items():
        others = [sample[name] for sample in samples if name in sample]
        reference = None if truth is None else truth.get(name)
        if first.numel():
            found[name] = arithmetic_of(others, reference)
    return found


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if not (left.is_floating_point() or left.is_complex()):
        return bool((left == right).all())
    return bitwise(left, right).right


def _perturbed(case: Case, number: int, computes: torch.dtype | None) -> Case:
    def inputs(rank: int, step: int) -> Any:
        generator = torch.Generator().manual_seed((number * 4096 + rank) * 4096 + step)
        return tree_map(lambda leaf: _moved(leaf, generator, computes), case.inputs(rank, step))

    return replace(case, inputs=inputs)


def _perturbed_state(state: Named, number: int, computes: torch.dtype | None) -> Named:
    generator = torch.Generator().manual_seed(number)
    return {name: _moved(tensor, generator, computes) for name, tensor in state.items()}


def _moved(value: Any, generator: torch.Generator, computes: torch.dtype | None) -> Any:
    """Move every floating-point number by one unit in the last place, up or down: half of one would stay."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    signs = torch.randint(0, 2, value.shape, generator=generator).to(value.device) * 2 - 1
    moved: Tensor = (value + value * signs * 2 * unit_roundoff(computes or value.dtype)).to(value.dtype)
    return moved


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
