"""A process group of many ranks in one process, which sends nothing; the process can be each of its ranks.

torch's fake backend has the size of the group, but its collectives return nothing to wait for, so a reducer
fails on it. Other kernels take their place. Invariant: afterwards the process has no process group, and
torch and the environment are as before.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world
from torch.utils._pytree import tree_leaves

import ddpopt
from ddpopt.cases.targets import is_of_user
from ddpopt.observation.launches import Launch, launch_of

FAKE = "fake"
RANKS = ("RANK", "LOCAL_RANK")
GROUP = "process_group"
KEYS = ("CPU", "CUDA")
LOADING = "targets.py"
"""The module among the cases that loads the others."""
CASES = Path(ddpopt.__file__).parent / "cases"
GENERATED = ("torchinductor", "<eval_with_key>")
"""Part of the path of every file that Inductor writes, and how the files of FX begin."""
COMPILED = "compiled code"
MAKER = "_new_group_with_tag"
MAKES_GROUP = "new_group"
SOURCES = "broadcast"
"""How collectives begin whose values come from one rank; DDP's own send what this process has anyway."""


@dataclass(frozen=True)
class RankSend:
    """A collective that a rank would send.

    Attributes:
        launch: what it sends.
        where: the innermost line of the user's code that sends it, or that compiled code does; empty if DDP
            does.
    """

    launch: Launch
    where: str


class World:
    """The ranks that this process is in turn.

    Args:
        size: how many there are.

    Attributes:
        rank: the one that this process is.
        group: a process group of all of them, besides the default one; once there is one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0
        self._reads: list[str] = []
        self._names: dict[str, str] = {}
        self.group: Any = None

    @property
    def default_group(self) -> str:
        """The name of the default process group."""
        c10d: Any = dist  # torch does not mark its re-exports
        return str(c10d.group.WORLD.group_name)

    def named(self, group: str) -> str:
        """The name of a group, the same on all ranks: torch numbers groups that a program makes meanwhile."""
        return self._names.get(group, group)

    def members(self) -> dict[str, list[int]]:
        """The ranks of each process group that does not have all, by its name."""
        found = {}
        groups: Any = _world.pg_group_ranks.items()
        for group, ranks in groups:
            # torch lists a number for groups that this process is no member of
            if isinstance(group, dist.ProcessGroup) and len(ranks) < self.size:
                found[self.named(str(group.group_name))] = [*ranks]
        return found

    def making(self, sends: "Sends", new_group: Callable[..., Any]) -> Callable[..., Any]:
        """Take the place of the function that makes groups, whose members wait for each other.

        Args:
            sends: to which it is added.
            new_group: torch's function.
        """

        @functools.wraps(new_group)
        def make(*args: Any, **kwargs: Any) -> Any:
            made = new_group(*args, **kwargs)
            if isinstance(made, dist.ProcessGroup):
                ranks = ", ".join(map(str, _world.pg_group_ranks[made]))
                name = self._names[str(made.group_name)] = f"of ranks {ranks}, made meanwhile"
                launch = Launch(MAKES_GROUP, 0, 0, "", in_backward=False, group=name)
                sends.sent.append(RankSend(launch, users_line_now()))
            return made

        return make

    def become(self, rank: int) -> None:
        """Let this process be a rank from now on; on a GPU each rank is on a node of its own."""
        self.rank = rank
        os.environ["RANK"] = str(rank)
        if not torch.cuda.is_available():
            os.environ["LOCAL_RANK"] = str(rank)

    @contextlib.contextmanager
    def noting_reads(self) -> Iterator[list[str]]:
        """A block in which it is noted how the program asks which rank it is."""
        self._reads = reads = []
        of_environment: Any = type(os.environ)
        read = of_environment.__getitem__

        def get(environment: Any, name: str) -> Any:
            if name in RANKS:
                reads.append(name)
            return read(environment, name)

        with patch.object(of_environment, "__getitem__", get):
            yield reads

    def rank_in(self, group: Any) -> int:
        """Its rank in a group, as `dist.ProcessGroup.rank` returns it; -1 if it is no member."""
        self._reads.append("rank")
        members = _world.pg_group_ranks.get(group)
        return self.rank if members is None else members.get(self.rank, -1)


class Sends:
    """What a process sends in groups that send nothing: the kernels of collectives, while `replacing`.

    Args:
        world: the ranks.

    Attributes:
        sent: what was sent so far.
        factor: what each result is multiplied by, to see what depends on it: a whole number.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.sent: list[RankSend] = []
        self.factor = 1.0

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """A block in which collectives are only recorded, and complete at once."""
        torch_c: Any = torch._C
        kernels: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # of torch
        try:
            for schema in torch_c._jit_get_all_schemas():
                if schema.name.startswith("c10d::") and GROUP in [each.name for each in schema.arguments]:
                    kernel = functools.partial(self._called, schema)
                    for key in KEYS:
                        kernels.impl(schema.name, kernel, key, allow_override=True)
            yield
        finally:
            kernels._destroy()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # of torch; compiled code calls it
    def _called(self, schema: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the place of a collective."""
        launch = launch_of(schema, args, kwargs)
        assert launch is not None
        where = users_line_now()
        self.sent.append(RankSend(replace(launch, group=self._world.named(launch.group)), where))
        target, *others = args
        if "output" in schema.arguments[0].name:
            _fill(target, others[0])
        is_of_ddp = not where
        if self.factor != 1 and not (is_of_ddp and launch.op.startswith(SOURCES)):
            for leaf in _tensors(target):
                _multiply(leaf, self.factor, numbers_only=is_of_ddp)
        if not schema.returns:
            return None
        future = torch.futures.Future[Any]()
        future.set_result(_tensors(target))
        c10d: Any = _distributed_c10d  # torch does not list all of it
        work = c10d._create_work_from_future(future).boxed()
        return work if len(schema.returns) == 1 else (target, work)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _multiply(result: Tensor, factor: float, *, numbers_only: bool) -> None:
    """Change a result; DDP's own integers, such as its map of used parameters, stay as they are."""
    if result.is_floating_point() or result.is_complex():
        result.mul_(factor)
    elif result.dtype == torch.bool and not numbers_only:
        result.logical_not_()
    elif not numbers_only:
        result.mul_(int(factor))


def _fill(outputs: Any, inputs: Any) -> None:
    """Write what this rank sends to where it would receive what others send."""
    sent = torch.cat([leaf.flatten() for leaf in _tensors(inputs)])
    for output in _tensors(outputs):
        if sent.numel():
            times = -(-output.numel() // sent.numel())
            output.copy_(sent.repeat(times)[: output.numel()].view_as(output))


def users_line_now() -> str:
    """The innermost line of the user's code that is running, as long as DDP or the judge did not call it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_compiled(file):
            return COMPILED
        if is_of_program(file):
            return line_of(frame)
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("ddpopt.judge.training", "torch.nn.parallel.distributed")):
            return ""
        frame = frame.f_back
    return ""


def is_of_program(file: str) -> bool:
    """Whether a file is part of the case under test, and not of torch, the judge or generated code."""
    if file.startswith("<") or is_compiled(file):
        return False
    is_own_case = Path(file).is_relative_to(CASES) and not file.endswith(LOADING)
    return is_own_case or is_of_user(file)


def is_compiled(file: str) -> bool:
    """Whether a file is generated code, of FX or of Inductor."""
    return GENERATED[0] in file or file.startswith(GENERATED[1])


def line_of(frame: FrameType) -> str:
    """The line that a frame is at, as text."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


@contextlib.contextmanager
def simulated(size: int) -> Iterator[tuple[World, Sends]]:
    """A default process group of `size` ranks that sends nothing, instead of the one that there is.

    Args:
        size: the number of ranks.

    Yields:
        Its ranks, and what they send.
    """
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    c10d: Any = dist  # torch does not mark its re-exports
    if dist.is_initialized():
        dist.destroy_process_group()
    world = World(size)
    sends = Sends(world)
    local_size = 1 if torch.cuda.is_available() else size
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local_size)}
    environment = patch.dict(os.environ, RANK="0", LOCAL_RANK="0", **sizes)
    # torch replaces it permanently when it makes a group
    excepthook = patch.object(sys, "excepthook", sys.excepthook)
    with environment, excepthook, patch.object(dist.ProcessGroup, "rank", lambda group: world.rank_in(group)):
        dist.init_process_group(FAKE, store=c10d.HashStore(), rank=0, world_size=size)
        try:
            with sends.replacing():
                world.group = dist.new_group()
                # `dist.new_group` ends in this function, wherever a program has imported it from
                make = world.making(sends, getattr(distributed_c10d, MAKER))
                with patch.object(distributed_c10d, MAKER, make):
                    yield world, sends
        finally:
            dist.destroy_process_group()
