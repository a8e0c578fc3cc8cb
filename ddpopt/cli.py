"""The ``ddpopt`` command.

Exit codes: 0 right, 1 the program under test is wrong, 2 usage, 3 infrastructure. An error of ours is printed
to stderr, without a traceback, and exits with its own code.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import ddpopt
from ddpopt.errors import DdpoptError, UsageError

STDOUT = "-"


class _Group(TyperGroup):
    """The command, with our errors turned into messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DdpoptError as error:
            typer.echo(f"ddpopt: error: {error}", err=True)
            raise typer.Exit(error.exit_code) from error


app = typer.Typer(
    cls=_Group,
    help="Make torch.compile and DistributedDataParallel agree on gradient buckets.",
    epilog="Exit codes: 0 right, 1 the program under test is wrong, 2 usage, 3 infrastructure.",
    no_args_is_help=True,
    add_completion=False,
    # plain help and plain errors, the same in every terminal and every log
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

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
    str | None,
    typer.Option(metavar="A,B,...", help="DDP's bucket_cap_mb_list, in MiB.", show_default=False),
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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddpopt {ddpopt.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


@app.command(short_help="Show the plan, DDP's own buckets, and torch's DDPOptimizer.")
def explain(
    target: Target,
    bucket_cap_mb: CapMb = None,
    bucket_cap_mb_list: CapMbList = None,
    find_unused_parameters: FindUnused = None,
    static_graph: StaticGraph = None,
    json: Json = None,
) -> None:
    """Show ddpopt's plan, DDP's own buckets, and what torch's DDPOptimizer does.

    Nothing is trained: no process group and no GPU is needed. A case's own DDP arguments hold unless an
    option takes their place.
    """
    # heavy, and not needed to print help or the version of a broken installation
    from ddpopt.explain import explain_case
    from ddpopt.testing.case import resolve

    given = {
        "bucket_cap_mb": bucket_cap_mb,
        "bucket_cap_mb_list": _numbers(bucket_cap_mb_list),
        "find_unused_parameters": find_unused_parameters,
        "static_graph": static_graph,
    }
    case = resolve(target)
    explanation = explain_case(case, _override(dict(case.ddp_kwargs), given))
    if json is not None:
        _write(json, explanation.to_json())
    if json != STDOUT:
        typer.echo(str(explanation))


@app.command(short_help="Say what is in the way of overlap, and what to do about it.")
def doctor(  # noqa: PLR0913  # one for each option of the command line
    target: Target,
    backend: Annotated[str, typer.Option(help="Name of a Dynamo backend.")] = "inductor",
    steps: Annotated[int, typer.Option(help="Steps that each mode runs, at least 2.")] = 3,
    ranks: Annotated[int, typer.Option(help="Inputs of how many ranks are tried in eager.")] = 2,
    bucket_cap_mb: CapMb = None,
    bucket_cap_mb_list: CapMbList = None,
    find_unused_parameters: FindUnused = None,
    static_graph: StaticGraph = None,
    json: Json = None,
) -> None:
    """Run a model under DDP, eager and compiled, and say what is in the way of overlap.

    Graph breaks, recompiles, compile time, buckets, unused parameters and options, each with the next step
    to take. It runs in this process alone, on a process group of one rank. With inductor it may take minutes,
    for nothing is taken from a cache; '--backend aot_eager' is quick.
    """
    from ddpopt.doctor import diagnose
    from ddpopt.testing.case import resolve

    given = {
        "bucket_cap_mb": bucket_cap_mb,
        "bucket_cap_mb_list": _numbers(bucket_cap_mb_list),
        "find_unused_parameters": find_unused_parameters,
        "static_graph": static_graph,
    }
    case = resolve(target)
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints is no part of the report
        diagnosis = diagnose(
            case,
            _override(dict(case.ddp_kwargs), given),
            backend=backend,
            steps=steps,
            ranks=ranks,
            tell=lambda doing: typer.echo(f"ddpopt: {doing}", err=True),
        )
    if json is not None:
        _write(json, diagnosis.to_json())
    if json != STDOUT:
        typer.echo(str(diagnosis))


@app.command(short_help="Compare a compiled data-parallel step with eager DDP.")
def verify(  # noqa: PLR0913  # one for each option of the command line
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET]", help="As for 'ddpopt explain'.", show_default=False),
    ] = None,
    nproc: Annotated[int, typer.Option(help="Ranks to start; under torchrun, its ranks are used.")] = 2,
    strategy: Annotated[str, typer.Option(help="ddpopt's: split, inline or auto.")] = "auto",
    backend: Annotated[
        str | None,
        typer.Option(
            help="Name of a Dynamo backend. By default inductor; for the matrix eager, which takes minutes.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Modes to judge, or 'all': see 'ddpopt modes'. By default ddpopt's.",
            show_default=False,
        ),
    ] = None,
    options: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Ways to use DDP, or 'all': see 'ddpopt modes'. By default none but the target's own.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of training; DDP has settled by the third.")] = 3,
    dtype: Annotated[
        str | None, typer.Option(help="Compute in this dtype, like bfloat16.", show_default=False)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda; by default cuda if each rank has a GPU.", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Limit of the whole run, in seconds.")] = 3600.0,
    bucket_cap_mb: CapMb = None,
    bucket_cap_mb_list: CapMbList = None,
    find_unused_parameters: FindUnused = None,
    static_graph: StaticGraph = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Judge every mode under every option on six small cases.")
    ] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Put faults in, and count which are found.")
    ] = False,
    locate: Annotated[bool, typer.Option(help="If something is wrong, look where.")] = True,
    reproduction: Annotated[
        str, typer.Option(metavar="FILE", help="Where to write the script that shows it.")
    ] = "ddpopt_reproduction.py",
    json: Json = None,
    junit: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write JUnit XML.", show_default=False)
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page.", show_default=False)
    ] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Write annotations and a step summary for GitHub Actions.")
    ] = False,
) -> None:
    """Train a model for some steps in eager DDP and compiled, and compare everything.

    Gradients, buckets, collectives, buffers, random numbers and the number of compilations, on every rank.
    Tolerances are derived and not guessed. Whatever is wrong is named by parameter, bucket, rank and level.
    """
    from ddpopt import cli_verify

    files = cli_verify.Files(json, junit, html, github)
    given = {
        "bucket_cap_mb": bucket_cap_mb,
        "bucket_cap_mb_list": _numbers(bucket_cap_mb_list),
        "find_unused_parameters": find_unused_parameters,
        "static_graph": static_graph,
    }
    wholes = sum((matrix, self_test, target is not None))
    if wholes != 1:
        raise UsageError(
            f"expected one of TARGET, --matrix and --self-test, got {wholes or 'none'} of them; "
            "see 'ddpopt verify --help'"
        )
    if self_test:
        raise typer.Exit(cli_verify.self_test(nproc, files))
    request = cli_verify.Request(
        target=target,
        nproc=nproc,
        strategy=strategy,
        backend=backend or ("eager" if matrix else "inductor"),
        modes=mode,
        options=options,
        steps=steps,
        dtype=dtype,
        device=device,
        limit_s=timeout,
        locate=locate,
        reproduction=reproduction,
        ddp_kwargs=_override({}, given),
    )
    verdict = cli_verify.run(request, files)
    raise typer.Exit(verdict.exit_code)


@app.command(short_help="List the modes and options that 'verify' knows.")
def modes() -> None:
    """List the modes and options that 'ddpopt verify' knows."""
    from ddpopt.report.tables import Column, table
    from ddpopt.verify.modes import MODES
    from ddpopt.verify.options import OPTIONS

    for title, rows in (("mode", MODES), ("option", OPTIONS)):
        columns = [Column(title), Column("about", fills=True)]
        typer.echo(table(columns, [(row.name, row.about) for row in rows]))
        typer.echo()


@app.command(short_help="List the cases of the corpus.")
def cases() -> None:
    """List the cases of the corpus, each of which is a TARGET."""
    from ddpopt.report.tables import Column, table
    from ddpopt.testing import corpus

    columns = [Column("case"), Column("about", fills=True)]
    typer.echo(table(columns, [(case.name, case.about) for case in corpus.cases()]))


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"--bucket-cap-mb-list: expected numbers with commas between, like 3,1,1, got {text!r}"
        ) from error


def _override(ddp_kwargs: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A case's arguments with those of the command line in their place."""
    options = {name: value for name, value in given.items() if value is not None}
    if "bucket_cap_mb" in options:
        ddp_kwargs.pop("bucket_cap_mb_list", None)  # DDP lets the list win, the user asked for the cap
    return ddp_kwargs | options


def _write(file: str, text: str) -> None:
    if file == STDOUT:
        typer.echo(text)
        return
    try:
        Path(file).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--json: cannot write {file!r}: {error.strerror}; name a file that can be"
        ) from error


def main() -> None:
    """Run the command; targets are looked for in the current directory too, as with ``python -m``."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    app(prog_name="ddpopt")
