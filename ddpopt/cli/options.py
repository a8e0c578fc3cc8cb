"""The arguments and options of the command line: how each is spelled, typed and explained.

Invariant: an option that several commands have means the same in all of them, and has the same default.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from ddpopt.errors import UsageError
from ddpopt.judge.engines import names
from ddpopt.judge.engines.names import full_name, named

NAMES = "A,B,..."
BACKEND = "aot_eager"
NPROC = 2
STEPS = 3
MOST_MB = 8.0
COUNTS = ("nproc", "simulate", "steps", "trajectory")
POSITIVE = ("timeout", "minutes", "examples", "tries", "most_mb")
TIMEOUT_S = 300.0
"""Inductor may take minutes to compile a large model."""

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A case of the corpus (see 'ddpopt cases'), or package.module:name of a function that returns "
        "(model, inputs), (model, args, kwargs) or a ddpopt.testing.Case.",
    ),
]
Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARGET",
        help="As for 'ddpopt explain', or 'corpus' for all cases; by default, all that the baseline has.",
    ),
]
Dumps = Annotated[
    list[str],
    typer.Argument(metavar="DUMP", help="Files of the flight recorder, or folders that hold nothing else."),
]
HungRanks = Annotated[
    int | None,
    typer.Option(
        "--world-size", metavar="N", help="Ranks of the job; by default as many as the names of files say."
    ),
]
CaseFile = Annotated[str, typer.Argument(metavar="CASE", help="A case that 'ddpopt fuzz' wrote.")]
Ddp = Annotated[
    list[str] | None,
    typer.Option(
        "--ddp",
        metavar="KEY=VALUE",
        help="An argument of DistributedDataParallel, such as bucket_cap_mb=0.5, static_graph=true or "
        "bucket_cap_mb_list=3,1; repeatable. It overrides the target's own.",
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write JSON to FILE; '-' writes it to stdout instead of the text."
    ),
]
Profile = Annotated[
    str | None, typer.Option(metavar="FILE", help="A profile: show the step that it predicts.")
]
Reports = Annotated[
    list[str] | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write a report: .xml for JUnit, .html for a page, .md for GitHub; repeatable.",
    ),
]
Nproc = Annotated[
    int, typer.Option(help="Number of ranks; verify, matrix, tune, link and gate use torchrun's, if any.")
]
Simulate = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Judge N ranks in one process, which is each of them in turn; instead of --nproc, or with it.",
    ),
]
Trajectory = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Also train N steps, each from where the last one ended, and judge whether the distance from "
        "eager is more than rounding explains.",
    ),
]
SomeNproc = Annotated[
    int | None, typer.Option(help="Number of ranks; by default 2, or none with --simulate.")
]
Strategy = Annotated[
    str, typer.Option(help="auto, inline, split, or step, of which the buckets are those of inline.")
]
Mesh = Annotated[
    str | None,
    typer.Option(metavar="COPIESxPARTS", help="Instead of --nproc, such as 2x2: DDP and tensor parallelism."),
]
Backend = Annotated[
    str,
    typer.Option(
        help="Dynamo backend: a name, or package.module:function. aot_eager is compared bit for bit; "
        "inductor also runs generated code, and takes longer."
    ),
]
Modes = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar=NAMES,
        help="Modes to run, or 'all'. By default ddpopt-inline; gate, fuzz: also ddpopt-split; matrix: all.",
    ),
]
Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="MODULE:NAME",
        help="An engine of your own: package.module:name of a ddpopt.testing.Engine, or of a function that "
        "makes one; repeatable. Judged with those of --mode.",
    ),
]
Options = Annotated[
    str | None,
    typer.Option(
        metavar=NAMES,
        help="Ways to use DDP, or 'all' (see 'ddpopt modes'). By default 'default'; for 'matrix', all.",
    ),
]
Steps = Annotated[int, typer.Option(help="Training steps. DDP rebuilds its buckets before step 2.")]
Dtype = Annotated[str | None, typer.Option(help="Compute in this dtype, such as bfloat16.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda if each rank has a GPU.")]
Timeout = Annotated[
    float,
    typer.Option(help="Time limit per trial (one mode, case and option), or of tune and link, in seconds."),
]
Locate = Annotated[
    bool, typer.Option(help="If something is wrong, find out where, and write ddpopt_reproduction.py.")
]
TunedMode = Annotated[str, typer.Option("--mode", help="ddpopt-inline, ddpopt-split or eager.")]
WorldSize = Annotated[
    str | None, typer.Option(metavar="N,N,...", help="Predict the step of so many ranks, too.")
]
MostMb = Annotated[float, typer.Option(help="Limit of a tuned bucket in MiB; a larger gradient is alone.")]
Trace = Annotated[str | None, typer.Option(metavar="FILE", help="Write the steps as a trace for Perfetto.")]
Html = Annotated[str | None, typer.Option(metavar="FILE", help="Write a page with a picture of the steps.")]
LinkFile = Annotated[
    str | None, typer.Option("--link", metavar="FILE", help="Link; by default measured, or the profile's.")
]
BaselineFile = Annotated[str, typer.Option("--baseline", metavar="FILE", help="Baseline to compare with.")]
Update = Annotated[
    bool, typer.Option("--update", help="Write what changed, and the options given, to the baseline.")
]
Minutes = Annotated[float | None, typer.Option(help="Time limit of the search, in minutes; by default none.")]
Examples = Annotated[int | None, typer.Option(help="Maximum number of models, including earlier runs.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Out = Annotated[
    str, typer.Option(metavar="DIR", help="Folder of the campaign; an existing campaign is resumed.")
]
Script = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="FILE.py",
        help="Script to write, with the small case next to it; by default next to CASE.",
    ),
]
Without = Annotated[str | None, typer.Option(metavar=NAMES, help="Features to exclude.")]
Tries = Annotated[int, typer.Option(help="Maximum number of models to try.")]


def ddp_arguments(given: Sequence[str]) -> dict[str, Any]:
    """Read DDP's arguments.

    Args:
        given: each as ``key=value``.

    Returns:
        The arguments of ``DistributedDataParallel``.

    Raises:
        UsageError: one has another form, or DDP does not know it.
    """
    from ddpopt.planning.limits import BucketConfig  # imports torch

    found = dict(map(_ddp_argument, given))
    BucketConfig.from_kwargs(**found)
    return found


def _ddp_argument(given: str) -> tuple[str, Any]:
    key, equals, text = given.partition("=")
    try:
        if not equals:
            raise ValueError(given)
        is_list = "," in text and not text.startswith("[")
        return key, json.loads(f"[{text}]" if is_list else text.lower())
    except ValueError as error:
        raise UsageError(
            "--ddp: expected KEY=VALUE where VALUE is a number, true, false, or comma-separated numbers, "
            f"got {given!r}"
        ) from error


def chosen(text: str | None, known: Iterable[str], option: str) -> tuple[str, ...]:
    """Read a comma-separated list of names; ``all`` stands for all known names.

    Args:
        text: the given text; None if none was given.
        known: all names.
        option: the command-line option, for the error.

    Returns:
        The names, each once; empty if nothing was given.

    Raises:
        UsageError: a name is unknown.
    """
    all_of_them = dict.fromkeys(known)
    if text is None or text == "all":
        return tuple(all_of_them) if text else ()
    parts = [part.strip() for part in text.split(",")]
    found = tuple(dict.fromkeys(part if part in all_of_them else full_name(part) for part in parts))
    for name in found:
        named(name, all_of_them, option)
    return found


def require_usable(given: Mapping[str, Any]) -> None:
    """Refuse wrong numbers and names before torch is imported, which takes seconds.

    Args:
        given: a command's arguments, by name.

    Raises:
        UsageError: a count is not positive, or there is no such mode or option.
    """
    require_positive(**{name: given.get(name) for name in POSITIVE})
    for name in COUNTS:
        number = given.get(name)
        if number is not None and number < 1:
            raise UsageError(f"--{name}: expected a positive number, got {number!r}")
    if "options" in given:  # of 'verify' and 'matrix', whose modes are all that there are
        chosen(given["options"], names.OPTIONS, "--options")
        others = {*(given["mode"] or "").split(",")} - {*names.MODES}
        chosen(given["mode"], (*names.MODES, *(names.registered() if others else ())), "--mode")


def require_positive(**numbers: float | None) -> None:
    """Refuse limits that are not positive or not finite.

    Raises:
        UsageError: one is not a positive finite number.
    """
    for name, number in numbers.items():
        if number is not None and not 0 < number < math.inf:
            raise UsageError(f"--{name.replace('_', '-')}: expected a positive number, got {number!r}")
