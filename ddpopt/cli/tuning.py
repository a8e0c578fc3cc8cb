"""``ddpopt tune`` and ``ddpopt link``: check the arguments, measure on ranks, and show what was found.

Invariant: what can be checked is checked before anything is measured; so what was measured is shown.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddpopt.cases.case import Case
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
from ddpopt.tuning.simulate import Timeline

NOTE = (
    "More ranks than were measured: a model, in which all ranks are alike, each hop is as on this link, and "
    "each rank keeps its batch."
)


@dataclass(frozen=True)
class Tuning:
    """What ``ddpopt tune`` was asked for.

    Attributes:
        case: the case.
        nproc: the number of ranks to start.
        device: their device; None for the default.
        timeout_s: the time limit, in seconds.
        mode: name of the mode.
        backend: name of the backend.
        link: file with a link; None to measure it.
        world_size: more world sizes, with commas; None for none.
        most_mb: limit of a bucket, in MiB.
        json: file for the result; None for none.
        trace: file for a trace; None for none.
        html: file for a page; None for none.
    """

    case: Case
    nproc: int
    device: str | None
    timeout_s: float
    mode: str
    backend: str
    link: str | None
    world_size: str | None
    most_mb: float
    json: str | None
    trace: str | None
    html: str | None


def tune(asked: Tuning) -> None:
    """Tune a case, and show and write the result.

    Args:
        asked: what to do.

    Raises:
        UsageError: an argument or the case cannot be used.
        InfrastructureError: a rank failed.
    """
    strategy = named(asked.mode, comparing.STRATEGIES, "--mode")
    backend = backend_of(asked.backend)
    wrap = None if strategy == "eager" else partial(compile, backend=backend)
    stored = None if asked.link is None else Link.from_file("--link", asked.link)
    nproc_here = int(os.environ["WORLD_SIZE"]) if under_torchrun() else asked.nproc
    sizes = scale.world_sizes(asked.world_size, stored.world_size if stored else nproc_here)
    most_bytes = asked.most_mb * MIB
    task = (comparing.tuned_on, asked.case, strategy, wrap, stored, (), most_bytes)
    tuned: comparing.Tuned | None = _measured(asked.nproc, asked.device, asked.timeout_s, *task)
    if tuned is None:
        return
    steps = {row.name: row.predicted for row in tuned.rows}
    steps |= scale.steps_of(tuned.profile, tuned.link, sizes, most_bytes)
    title = f"{asked.case.name} on {tuned.profile.world_size} ranks, {tuned.profile.strategy}"
    link = f"{tuned.link}"
    if asked.link is not None:
        link += f"; of {asked.link}, but steps are measured here"
    parts = [
        "\n".join(map(paragraph, (title, link))),
        _table(tuned, steps),
        _said(tuned, asked.case.name, asked.json),
    ]
    if sizes:
        parts.append(paragraph(NOTE))
    text = "\n\n".join(parts)
    steps |= {f"tuned, observed on rank {rank}": step for rank, step in enumerate(tuned.observed)}
    others = []
    if asked.trace is not None:
        trace = pictures.chrome_trace(tuned.rows[-1].predicted, tuned.observed)
        others.append(partial(write, "--trace", asked.trace, trace))
    if asked.html is not None:
        others.append(partial(write, "--html", asked.html, pictures.page(title, steps, text)))
    show(text, tuned.to_json(), asked.json, others)


def _table(tuned: comparing.Tuned, steps: Mapping[str, Timeline]) -> str:
    """The buckets that were compared, and how long a step takes with each."""
    profile = tuned.profile
    alone_s = profile.forward_s + profile.backward_s + profile.update_s
    measured = {row.name: ms(row.step_s) for row in tuned.rows}
    rows = []
    for name, step in steps.items():
        mib = [sent.nbytes / MIB for sent in step.buckets]
        count = f"{len(mib)} bucket" if len(mib) == 1 else f"{len(mib)} buckets"
        sizes = f"MiB: first {mib[0]:.2f}, last {mib[-1]:.2f}, largest {max(mib):.2f}"
        note = f"{count}, {sizes}; efficiency {alone_s / step.step_s:.1%}"
        rows.append((Noted(name, note), ms(step.step_s), measured.get(name, "-"), ms(step.exposed_s)))
    return table([Column("buckets"), *numbers("predicted", "measured", "exposed")], rows)


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
