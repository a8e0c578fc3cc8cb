"""``ddpopt fuzz``: read the arguments, run a campaign, show how it goes, write what came of it.

Invariant: every argument is checked before a worker starts, and a campaign that is interrupted writes its
summary too.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ddpopt.errors import UsageError
from ddpopt.fuzz.text import fuzz_text, progress_line
from ddpopt.judge.report.passing_line import PassingLine

if TYPE_CHECKING:
    from ddpopt.fuzz.campaign import Campaign
    from ddpopt.fuzz.cases import FoundCase
    from ddpopt.fuzz.journal import Plan

SUMMARY = "summary.json"
MODES = ("torch-ddp-optimizer", "ddpopt-split", "ddpopt-inline")
"""Those that are fuzzed where none is named."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        minutes: how long; None for no limit.
        examples: how many models; None for no limit.
        seed: of all draws.
        modes: names of modes, each perhaps several with commas between.
        backend: of Dynamo.
        nproc: ranks of each worker.
        workers: how many.
        out: folder of the campaign.
        database: shared with other machines.
        without: features that are not drawn.
        blocks: modules that register blocks.
        limit_s: of one mode of one model, in seconds.
    """

    minutes: float | None
    examples: int | None
    seed: int
    modes: Sequence[str]
    backend: str
    nproc: int
    workers: int
    out: str
    database: str | None
    without: str | None
    blocks: Sequence[str]
    limit_s: float


def run(request: Request) -> int:
    """Run a campaign, or go on with it.

    Args:
        request: what was asked for.

    Returns:
        The exit code: 1 if a mode failed.

    Raises:
        UsageError: an argument cannot be used.
        InfrastructureError: no worker could be had.
    """
    require_hypothesis()
    # heavy, and not needed to refuse an argument
    from ddpopt.fuzz.campaign import Campaign, Limits, open_database
    from ddpopt.fuzz.cases import write_whole
    from ddpopt.fuzz.journal import Journal
    from ddpopt.testing.drawn import known_features

    plan = planned(request)
    folder = _folder(request.out)
    limits = Limits(
        None if request.minutes is None else request.minutes * 60, request.examples, request.limit_s
    )
    database = open_database(request.database)
    with Journal(folder, plan) as journal:
        campaign = Campaign(journal, plan, limits, database)
        with PassingLine("starting workers") as progress:
            campaign.tell = functools.partial(_tell, campaign, progress, len(known_features()))
            summary = campaign.run()
    write_whole(folder / SUMMARY, f"{summary.to_json()}\n")
    typer.echo(fuzz_text(summary, str(journal.cases), known_features()))
    if not request.minutes and not request.examples:
        typer.echo(f"to resume: repeat the command with --out {request.out}", err=True)
    return int(summary.distinct > 0)


def planned(request: Request) -> Plan:
    """Check what was asked for.

    Args:
        request: the arguments.

    Returns:
        The plan of the campaign.

    Raises:
        UsageError: an argument cannot be used.
    """
    import torch

    from ddpopt.dynamo.backend import find_compiler
    from ddpopt.fuzz.journal import Plan
    from ddpopt.fuzz.questions import modes_named
    from ddpopt.fuzz.stream import Source, fingerprint, shard_of
    from ddpopt.judge.backends import backend_of
    from ddpopt.testing.drawn import known_features

    for name, number in (
        ("--minutes", request.minutes),
        ("--examples", request.examples),
        ("--nproc", request.nproc),
        ("--workers", request.workers),
        ("--limit", request.limit_s),
    ):
        if number is not None and not 0 < number < math.inf:
            raise UsageError(f"{name}: expected a positive number, got {number!r}")
    import_blocks(request.blocks)
    modes = modes_named(request.modes)
    find_compiler(backend_of(request.backend))
    without = tuple(part.strip() for part in (request.without or "").split(",") if part.strip())
    unknown = sorted(set(without) - known_features())
    if unknown:
        known = ", ".join(sorted(known_features()))
        raise UsageError(
            f"--without: expected names of features, got {', '.join(unknown)}; there are: {known}"
        )
    shard = shard_of()
    return Plan(
        request.seed,
        shard,
        request.workers,
        modes,
        request.backend,
        request.nproc,
        without,
        tuple(request.blocks),
        torch.__version__.partition("+")[0],
        fingerprint(Source(request.seed, shard, 0, without)),
    )


def import_blocks(modules: Sequence[str]) -> None:
    """Import what registers blocks of the user's own (`ddpopt.testing.drawn.register_block`).

    Args:
        modules: their names, as ``import`` takes them.

    Raises:
        UsageError: one cannot be imported, or registers nothing.
    """
    from ddpopt.testing.drawn.registry import BLOCKS

    for name in modules:
        before = len(BLOCKS)
        known = name in sys.modules
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UsageError(
                f"--blocks: importing {name!r} failed: {type(error).__name__}: {error}; expected the name of "
                "a module, as 'import' takes it, looked for in the current folder too"
            ) from error
        if len(BLOCKS) == before and not known:
            raise UsageError(
                f"--blocks: {name!r} registers no block; expected a module that calls "
                "ddpopt.testing.drawn.register_block"
            )


def _folder(out: str) -> Path:
    """The folder of this process: one for each, where several run together."""
    shards = int(os.environ.get("WORLD_SIZE") or os.environ.get("PYTEST_XDIST_WORKER_COUNT") or 1)
    from ddpopt.fuzz.stream import shard_of

    return Path(out) / f"shard-{shard_of()}" if shards > 1 else Path(out)


def require_hypothesis() -> None:
    """Say what to install where models cannot be drawn.

    Raises:
        UsageError: Hypothesis is not installed.
    """
    try:
        import hypothesis  # noqa: F401  # whether it is there
    except ImportError as error:
        raise UsageError("drawing models takes Hypothesis; 'pip install hypothesis'") from error


def _tell(campaign: Campaign, progress: PassingLine, features: int, new: tuple[FoundCase, ...]) -> None:
    """Show what came of a model."""
    for case in new:
        script = campaign.journal.cases / f"{case.stem}.py"
        progress.say(f"new: {case.owner}: {case.signature} ({script})")
    progress.show(lambda: progress_line(campaign.summary(), features))
