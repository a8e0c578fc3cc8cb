"""The arguments and options of the command line: how each is spelled, typed and explained.

They stand apart from the commands, so that a command reads as what it does, and an option that several
commands have is the same in all of them.

Invariant: an option that is not given leaves what holds without it: its default is None, or stands in the
command's own signature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ddpopt.errors import UsageError

STDOUT = "-"
NAMES = "A,B,..."

# ------------------------------------------------------------------------------------------------- of several

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A case of the corpus (see 'ddpopt cases'), or package.module:name of a function that returns "
        "(model, inputs), (model, args, kwargs) or a ddpopt.testing.Case.",
        show_default=False,
    ),
]
CapMb = Annotated[float | None, typer.Option(help="DDP's bucket_cap_mb, in MiB.", show_default=False)]
CapMbList = Annotated[
    str | None, typer.Option(metavar=NAMES, help="DDP's bucket_cap_mb_list, in MiB.", show_default=False)
]
FindUnused = Annotated[bool | None, typer.Option(help="As DDP's own argument.", show_default=False)]
StaticGraph = Annotated[bool | None, typer.Option(help="As DDP's own argument.", show_default=False)]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write JSON to FILE beside the text, or to stdout in its place ('-').",
        show_default=False,
    ),
]

# -------------------------------------------------------------------------------------------------- of doctor

TrialBackend = Annotated[str, typer.Option(help="Name of a Dynamo backend.")]
TrialSteps = Annotated[int, typer.Option(help="Steps that each mode runs, at least 2.")]
TrialRanks = Annotated[int, typer.Option(help="Inputs of how many ranks are tried in eager.")]

# -------------------------------------------------------------------------------------------------- of verify

TargetIfAny = Annotated[
    str | None, typer.Argument(metavar="[TARGET]", help="As for 'ddpopt explain'.", show_default=False)
]
Nproc = Annotated[int, typer.Option(help="Ranks to start; under torchrun, its ranks are used.")]
Strategy = Annotated[str, typer.Option(help="ddpopt's: split, inline or auto.")]
BackendIfAny = Annotated[
    str | None,
    typer.Option(
        help="Name of a Dynamo backend. By default inductor; for the matrix eager, which takes minutes.",
        show_default=False,
    ),
]
Modes = Annotated[
    str | None,
    typer.Option(
        metavar=NAMES,
        help="Modes to judge, or 'all': see 'ddpopt modes'. By default ddpopt's.",
        show_default=False,
    ),
]
Options = Annotated[
    str | None,
    typer.Option(
        metavar=NAMES,
        help="Ways to use DDP, or 'all': see 'ddpopt modes'. By default none but the target's own.",
        show_default=False,
    ),
]
Steps = Annotated[int, typer.Option(help="Steps of training; DDP has settled by the third.")]
Dtype = Annotated[str | None, typer.Option(help="Compute in this dtype, like bfloat16.", show_default=False)]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; by default cuda if each rank has a GPU.", show_default=False)
]
Limit = Annotated[float, typer.Option(help="Limit of the whole run, in seconds.")]
TrialLimit = Annotated[
    float,
    typer.Option(
        "--trial-timeout", help="Limit of one trial, and of eager DDP's runs before it, in seconds."
    ),
]
LocateLimit = Annotated[
    float, typer.Option("--locate-timeout", help="Limit of looking where it goes wrong, in seconds.")
]
Matrix = Annotated[
    bool, typer.Option("--matrix", help="Judge every mode under every option on six small cases.")
]
SelfTest = Annotated[bool, typer.Option("--self-test", help="Put faults in, and count which are found.")]
Locate = Annotated[bool, typer.Option(help="If something is wrong, look where.")]
Reproduction = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Where to write the script that shows it. By default ddpopt_reproduction.py.",
        show_default=False,
    ),
]
Junit = Annotated[str | None, typer.Option(metavar="FILE", help="Write JUnit XML.", show_default=False)]
Html = Annotated[str | None, typer.Option(metavar="FILE", help="Write a page.", show_default=False)]
Github = Annotated[
    bool, typer.Option("--github", help="Write annotations and a step summary for GitHub Actions.")
]

# ---------------------------------------------------------------------------------------------------- of gate

TargetsIfAny = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TARGET]...",
        help="As for 'ddpopt explain', or 'corpus' for every case of it. By default the baseline's own.",
        show_default=False,
    ),
]
BaselineFile = Annotated[
    str, typer.Option("--baseline", metavar="FILE", help="What to compare with.", show_default=False)
]
Update = Annotated[
    bool, typer.Option("--update", help="Write the baseline, for review, and its settings from the options.")
]
Only = Annotated[
    str | None,
    typer.Option(metavar=NAMES, help="Look at these of the baseline's targets alone.", show_default=False),
]
GateModes = Annotated[
    str | None,
    typer.Option("--mode", metavar=NAMES, help="Modes to measure: see 'ddpopt modes'.", show_default=False),
]
GateBackend = Annotated[str | None, typer.Option(help="Name of a Dynamo backend.", show_default=False)]
GateNproc = Annotated[int | None, typer.Option(help="Ranks to start.", show_default=False)]
GateSteps = Annotated[int | None, typer.Option(help="Steps of training.", show_default=False)]
GateDevice = Annotated[str | None, typer.Option(help="cpu or cuda.", show_default=False)]
Timed = Annotated[
    str | None,
    typer.Option(
        metavar=NAMES,
        help="Targets whose planning and compile time is held against torch's. By default all, up to three.",
        show_default=False,
    ),
]
Collected = Annotated[
    str | None,
    typer.Option("--tests", metavar=NAMES, help="Folders whose tests pytest counts.", show_default=False),
]

# ---------------------------------------------------------------------------------------------------- of fuzz

Minutes = Annotated[
    float | None, typer.Option(help="How long; without a limit until Ctrl-C.", show_default=False)
]
Examples = Annotated[
    int | None, typer.Option(help="Models of the whole campaign, earlier runs included.", show_default=False)
]
Seed = Annotated[int, typer.Option(help="Of all draws.")]
FuzzedModes = Annotated[
    list[str] | None,
    typer.Option(
        "--mode",
        metavar=NAMES,
        help="torch-ddp-optimizer, ddpopt-split, ddpopt-inline or whole; by default the first three.",
        show_default=False,
    ),
]
ExactBackend = Annotated[str, typer.Option(help="Name of a Dynamo backend; inductor takes seconds a model.")]
FuzzRanks = Annotated[int, typer.Option("--nproc", help="Ranks of each worker.")]
Workers = Annotated[int, typer.Option(help="Workers, each with models of its own.")]
Out = Annotated[str, typer.Option(metavar="DIR", help="Folder of the campaign; one that exists goes on.")]
Database = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|redis://...",
        help="Hypothesis's database to share failures in; further ones, with commas between, are only read.",
        show_default=False,
    ),
]
Without = Annotated[
    str | None, typer.Option(metavar=NAMES, help="Features that are not to be drawn.", show_default=False)
]
Blocks = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        help="Import this module, which registers blocks of your own; may be given several times.",
        show_default=False,
    ),
]
ModelLimit = Annotated[
    float,
    typer.Option(help="Limit of one mode of one model, in seconds."),
]

CaseFile = Annotated[
    str, typer.Argument(metavar="CASE", help="A case that 'ddpopt fuzz' wrote.", show_default=False)
]
Script = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="FILE.py",
        help="Where to write the script, with the small case beside it; by default beside CASE.",
        show_default=False,
    ),
]
Tries = Annotated[int, typer.Option(help="How many models may be tried.")]
SearchMinutes = Annotated[
    float | None, typer.Option("--minutes", help="How long the search may take.", show_default=False)
]


def ddp_arguments(
    bucket_cap_mb: float | None,
    bucket_cap_mb_list: str | None,
    find_unused_parameters: bool | None,
    static_graph: bool | None,
) -> dict[str, Any]:
    """Collect those of DDP's arguments that were given.

    Args:
        bucket_cap_mb: in MiB.
        bucket_cap_mb_list: numbers of MiB with commas between.
        find_unused_parameters: as DDP's own.
        static_graph: as DDP's own.

    Returns:
        DDP's arguments, without those that are None.

    Raises:
        UsageError: ``bucket_cap_mb_list`` is something else.
    """
    options = {
        "bucket_cap_mb": bucket_cap_mb,
        "bucket_cap_mb_list": _numbers(bucket_cap_mb_list),
        "find_unused_parameters": find_unused_parameters,
        "static_graph": static_graph,
    }
    return {name: value for name, value in options.items() if value is not None}


def overriding(own: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Put the arguments that were given in the place of a case's own.

    Args:
        own: the case's arguments for DDP.
        asked: those that were given.

    Returns:
        The arguments to pass to DDP.
    """
    # DDP lets the list win, and the user asked for the cap
    hidden = ("bucket_cap_mb_list",) if "bucket_cap_mb" in asked else ()
    return {name: value for name, value in own.items() if name not in hidden} | dict(asked)


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"--bucket-cap-mb-list: expected numbers with commas between, like 3,1,1, got {text!r}"
        ) from error
