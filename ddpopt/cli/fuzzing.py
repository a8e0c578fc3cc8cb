"""``ddpopt fuzz`` and ``ddpopt minimize``: read the arguments, show progress, write the results.

Invariant: every argument is checked before a rank starts, and an interrupted campaign also writes its
summary.
"""

import functools
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ddpopt.cli.options import chosen
from ddpopt.errors import UsageError, VerificationError
from ddpopt.ranks.environment import has_launched_peers
from ddpopt.terminal.files import show
from ddpopt.terminal.status import status_line

if TYPE_CHECKING:
    from ddpopt.fuzz.campaign import Campaign
    from ddpopt.fuzz.cases import FoundCase
    from ddpopt.fuzz.journal import CampaignPlan, Summary

SUMMARY = "summary.json"
OWN = ("ddpopt-split", "ddpopt-inline")
"""The modes that are fuzzed by default."""


def planned(  # one for each option of the command line
    seed: int, mode: str | None, backend: str, nproc: int, without: str | None
) -> "CampaignPlan":
    """Check the arguments of a campaign.

    Args:
        seed: the seed of all draws.
        mode: comma-separated names of modes; None for ddpopt's own.
        backend: the Dynamo backend.
        nproc: the number of ranks.
        without: comma-separated features that are not drawn.

    Returns:
        The plan of the campaign.

    Raises:
        UsageError: an argument cannot be used.
    """
    import torch

    from ddpopt.dynamo.backends import backend_of
    from ddpopt.fuzz.journal import CampaignPlan
    from ddpopt.fuzz.questions import MODES
    from ddpopt.fuzz.stream import Source, fingerprint
    from ddpopt.judge.engines.modes import mode as engine_of
    from ddpopt.testing.drawn import known_features

    named = (mode or ",".join(OWN)).split(",")
    modes = MODES if mode == "all" else tuple(engine_of(name, "--mode").name for name in named)
    backend_of(backend)
    left_out = chosen(without, sorted(known_features()), "--without")
    shard = int(os.environ.get("RANK") or 0)
    release = torch.__version__.partition("+")[0]
    draws = fingerprint(Source(seed, shard, left_out))
    return CampaignPlan(seed, shard, modes, backend, nproc, left_out, release, draws)


def fuzz(  # one for each option of the command line
    plan: "CampaignPlan",
    minutes: float | None,
    examples: int | None,
    timeout_s: float,
    out: str,
    json: str | None,
) -> int:
    """Run a campaign, or resume it.

    Args:
        plan: plan of the campaign.
        minutes: duration; None for no limit.
        examples: number of models; None for no limit.
        timeout_s: limit of one mode of one model, in seconds.
        out: folder of the campaign.
        json: file for JSON.

    Returns:
        The exit code: 1 if a mode failed, 3 if too few models were judged.

    Raises:
        UsageError: a folder cannot be used.
        InfrastructureError: no worker could be started.
    """
    from ddpopt.fuzz.campaign import Budget, Campaign
    from ddpopt.fuzz.cases import write_whole
    from ddpopt.fuzz.journal import Journal
    from ddpopt.fuzz.text import fuzz_lines
    from ddpopt.fuzz.workers import STARTING_LIMIT_S
    from ddpopt.ranks.arrival import meeting
    from ddpopt.testing.drawn import known_features

    # a separate folder for each process, if several run together
    folder = Path(out) / f"shard-{plan.shard}" if int(os.environ.get("WORLD_SIZE") or 1) > 1 else Path(out)
    limits = Budget(None if minutes is None else minutes * 60, examples, timeout_s)
    campaign = Campaign(Journal(folder, plan), plan, limits)
    began_s = time.monotonic()
    if has_launched_peers():
        meeting().arrive(STARTING_LIMIT_S, uses_gloo=False)
    try:
        with status_line("starting ranks") as show_line:
            campaign.tell = functools.partial(_tell, campaign, show_line, len(known_features()))
            campaign.run()
    finally:  # also if a file cannot be written
        keep = functools.partial(write_whole, folder / SUMMARY, f"{campaign.summary().to_json()}\n")
        last_model_s = timeout_s * (1 + len(plan.modes))
        summary = _of_all_shards(campaign, 2 * (time.monotonic() - began_s) + last_model_s + STARTING_LIMIT_S)
        if has_launched_peers() and plan.shard > 0:
            keep()
        else:
            cases = Path(out) / "shard-*" / "cases" if has_launched_peers() else campaign.journal.cases
            lines = fuzz_lines(summary, str(cases), known_features())
            show("\n".join(lines), summary.to_json(), json, [keep])
    if not minutes and not examples:
        typer.echo(f"to resume: repeat the command with --out {out}", err=True)
    return summary.exit_code


def _of_all_shards(campaign: "Campaign", limit_s: float) -> "Summary":
    """The summary of a campaign, with what torchrun's other ranks judged in theirs.

    Args:
        campaign: the campaign of this process.
        limit_s: how long to wait for the others, which may still be judging a model.
    """
    from ddpopt.fuzz.journal import summarized
    from ddpopt.ranks.arrival import meeting
    from ddpopt.ranks.exchange import PeersMissing

    if not has_launched_peers():
        return campaign.summary()
    try:
        shards = meeting().gather(campaign.journal.entries, limit_s)
    except PeersMissing as missing:
        typer.echo(f"ddpopt: {missing}", err=True)
        return campaign.summary()
    return summarized(campaign.plan, [entry for entries in shards for entry in entries])


def _tell(
    campaign: "Campaign", show_line: Callable[[str], None], features: int, new: "tuple[FoundCase, ...]"
) -> None:
    """Show the results for a model."""
    from ddpopt.fuzz.text import progress_line

    for case in new:
        file = shlex.quote(str(campaign.journal.cases / f"{case.stem}.json"))
        typer.echo(f"new: {case.owner}: {case.signature}\n  ddpopt minimize {file}", err=True)
    if sys.stderr.isatty():  # summarizing a long campaign takes a while
        show_line(progress_line(campaign.summary(), features))


def minimize(  # one for each option of the command line
    file: str, out: str | None, tries: int, minutes: float | None, timeout_s: float, json: str | None
) -> int:
    """Make a case small, and write the script that shows it.

    Args:
        file: the case.
        out: where the script goes, with the small case next to it; by default next to the case.
        tries: the number of models that may be tried.
        minutes: how long the search may take; None for no limit.
        timeout_s: limit of one model, in seconds.
        json: file for the small case as JSON.

    Returns:
        The exit code: 0 if the script shows the failure in a fresh interpreter, else 1.

    Raises:
        UsageError: the case cannot be read.
        NotJudgedError: it does not fail as recorded.
    """
    from ddpopt.fuzz.asking import answer_of, write_script
    from ddpopt.fuzz.cases import FoundCase, write_whole
    from ddpopt.fuzz.minimize import minimized
    from ddpopt.fuzz.text import minimized_lines
    from ddpopt.fuzz.workers import Worker

    case = FoundCase.read(Path(file))
    script = Path(out) if out is not None else Path(file).with_suffix(".small.py")
    if script.suffix != ".py" or not script.absolute().parent.is_dir():
        raise UsageError(f"--out: expected the name of a Python file in an existing folder, got {out!r}")
    small = script.with_suffix(".json")
    if small.absolute() == Path(file).absolute():
        raise UsageError(f"--out: {out!r} would overwrite {file!r}; choose another file")
    looking = f"looking for a smaller model: {case.signature}"
    with status_line(looking) as show_line, Worker(timeout_s) as worker:
        result = minimized(
            case,
            functools.partial(answer_of, worker),
            tries=tries,
            seconds=None if minutes is None else minutes * 60,
            tell=lambda found: show_line(
                f"{found.tries} models tried, steps left: {len(list(found.case.model.all_steps()))}"
            ),
        )
    try:
        write_whole(small, result.case.to_json())
        ran, reproduces = write_script(result.case, script, timeout_s)
    except UsageError:
        show("", result.case.to_json(), "-")
        raise
    lines = minimized_lines(result, script.name, ran, reproduces)
    show("\n".join(lines), result.case.to_json(), json)
    return 0 if reproduces else VerificationError.exit_code
