"""``ddpopt tune`` and ``ddpopt link``: check the arguments, measure on ranks, and show what was found.

Invariant: what can be checked is checked before anything is measured; so what was measured is shown.
"""

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from ddpopt.dynamo.api import compile
from ddpopt.dynamo.backends import backend_of
from ddpopt.errors import UsageError
from ddpopt.judge.engines.names import named
from ddpopt.ranks.failures import RanksFailed
from ddpopt.ranks.group import joined, under_torchrun
from ddpopt.ranks.pool import launch
from ddpopt.terminal.files import show, write
from ddpopt.terminal.status import status_line
from ddpopt.terminal.tables import MIB, Column, Noted, numbers, paragraph, table
from ddpopt.tuning import comparing, pictures, scale
from ddpopt.tuning.records import Link, ms

NOTE = (
    "More ranks than were measured: a model, in which all ranks are alike, each hop is as on this link, and "
    "each rank keeps its batch."
)


def tune(
    case: Any,
    ranks: tuple[int, str | None, float],
    how: tuple[str, str],
    link: str | None,
    world_size: str | None,
    most_mb: float,
    files: Mapping[str, str | None],
) -> None:
    """Tune a case, and show and write the result.

    Args:
        case: the case.
        ranks: the number of ranks to start, their device, and the time limit in seconds.
        how: the mode and the backend, by name.
        link: file with a link; None to measure it.
        world_size: more world sizes, with commas; None for none.
        most_mb: limit of a bucket, in MiB.
        files: by the names of their options; None for none.

    Raises:
        UsageError: an argument or the case cannot be used.
        InfrastructureError: a rank failed.
    """
    mode, backend = how
    strategy = named(mode, comparing.STRATEGIES, "--mode")
    compiled = partial(compile, backend=backend_of(backend))
    stored = None if link is None else Link.from_file("--link", link)
    here = int(os.environ["WORLD_SIZE"]) if under_torchrun() else ranks[0]
    sizes = scale.world_sizes(world_size, stored.world_size if stored else here)
    wrap = None if strategy == "eager" else compiled
    task = comparing.tuned_on, case, strategy, wrap, stored, (), most_mb * MIB
    found: comparing.Tuned | None = _measured(*ranks, *task)
    if found is None:
        return
    steps = {row.name: row.predicted for row in found.rows}
    profile = found.profile
    alone_s = profile.forward_s + profile.backward_s + profile.update_s
    steps |= scale.steps_of(profile, found.link, sizes, most_mb * MIB)
    measured = {row.name: ms(row.step_s) for row in found.rows}
    rows = []
    for name, step in steps.items():
        mib = [sent.nbytes / MIB for sent in step.buckets]
        count = f"{len(mib)} bucket{'s' * (len(mib) != 1)}"
        held = f"{count}, MiB: first {mib[0]:.2f}, last {mib[-1]:.2f}, largest {max(mib):.2f}"
        note = f"{held}; efficiency {alone_s / step.step_s:.1%}"
        rows.append((Noted(name, note), ms(step.step_s), measured.get(name, "-"), ms(step.exposed_s)))
    columns = [Column("buckets"), *numbers("predicted", "measured", "exposed")]
    given_link = f"{found.link}" if link is None else f"{found.link}; of {link}, but steps are measured here"
    title = f"{case.name} on {found.profile.world_size} ranks, {found.profile.strategy}"
    heads = "\n".join(map(paragraph, (title, given_link)))
    said = _said(found, case.name, files["json"])
    text = "\n\n".join([heads, table(columns, rows), said, *[paragraph(NOTE)] * bool(sizes)])
    steps |= {f"tuned, observed on rank {rank}": step for rank, step in enumerate(found.observed)}
    traced = pictures.chrome_trace(found.rows[-1].predicted, found.observed)
    made = {"trace": traced, "html": pictures.page(title, steps, text)}
    given = {name: file for name in made if (file := files[name]) is not None}
    others = [partial(write, f"--{name}", file, made[name]) for name, file in given.items()]
    show(text, found.to_json(), files["json"], others)


def _said(found: comparing.Tuned, case: str, file: str | None) -> str:
    """What the tuned buckets gain; where that is nothing, what is written and what to do."""
    if found.gain.is_won:
        return paragraph(f"tuned: {found.gain}.")
    lines = [f"Not tuned: {found.gain}."]
    if file is not None:
        lines.append(f"What is written has the buckets of {found.chosen.name}.")
    lines.append(
        "A link that is slower than this one may gain more. Where you train: torchrun --nproc-per-node N -m "
        f"ddpopt link --json link.json. Then: ddpopt tune {case} --link link.json"
        if found.gain.is_measured
        else f"On another link, or with other sizes: ddpopt tune {case} --most-mb 2"
    )
    return "\n".join(map(paragraph, lines))


def link(nproc: int, device: str | None, timeout_s: float, json: str | None) -> None:
    """Measure a link, and show and write it; raises as `tune`."""
    found: Link | None = _measured(nproc, device, timeout_s, comparing.link_on)
    if found is not None:
        show(paragraph(str(found)), found.to_json(), json)


def _measured(nproc: int, device: str | None, timeout_s: float, task: Any, *args: Any) -> Any:
    """Run a task of `ddpopt.tuning` on ranks; what it returns, or None on other ranks of torchrun."""
    with status_line("starting ranks") as show_line:
        if under_torchrun():
            with joined(on_event=show_line, timeout_s=timeout_s) as ranks, ranks.limited(timeout_s, "tuning"):
                found = task(ranks, *args)
                return found if ranks.rank == 0 else None
        try:
            return launch(task, *args, nproc=nproc, device=device, limit_s=timeout_s, on_event=show_line)[0]
        except RanksFailed as failed:
            kind, _, said = failed.culprits[0].error.partition(": ")
            if kind == f"{UsageError.__module__}.{UsageError.__name__}":
                raise UsageError(said) from None
            raise
