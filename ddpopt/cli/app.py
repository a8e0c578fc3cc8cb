"""The ``ddpopt`` command.

Exit codes: 0 right, 1 the program under test is wrong, 2 usage, 3 infrastructure. An error of ours is printed
to stderr, without a traceback, and exits with its own code.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from typer.core import TyperGroup

import ddpopt
from ddpopt.cli import options as given
from ddpopt.errors import DdpoptError, UsageError


class _Group(TyperGroup):
    """The command, with our errors turned into messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DdpoptError as error:
            typer.echo(f"ddpopt: error: {error}", err=True)
            raise typer.Exit(error.exit_code) from error
        except SystemExit as error:  # of the target's code: it must not end as if all were right
            typer.echo(f"ddpopt: error: {_ended(error)}", err=True)
            raise typer.Exit(UsageError.exit_code) from error


def _ended(error: SystemExit) -> str:
    from ddpopt.cases.case import users_line  # heavy, and loaded by then

    return f"the target ended the process: sys.exit({error.code!r}){users_line(error)}; have it return"


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
    target: given.Target,
    bucket_cap_mb: given.CapMb = None,
    bucket_cap_mb_list: given.CapMbList = None,
    find_unused_parameters: given.FindUnused = None,
    static_graph: given.StaticGraph = None,
    json: given.Json = None,
) -> None:
    """Show ddpopt's plan, DDP's own buckets, and what torch's DDPOptimizer does.

    Nothing is trained: no process group and no GPU is needed. A case's own DDP arguments hold unless an
    option takes their place.
    """
    # heavy, and not needed to print help or the version of a broken installation
    from ddpopt.cases.case import resolve
    from ddpopt.explanation.explain import explain_case

    asked = given.ddp_arguments(bucket_cap_mb, bucket_cap_mb_list, find_unused_parameters, static_graph)
    case = resolve(target)
    _show(explain_case(case, given.overriding(case.ddp_kwargs, asked)), json)


@app.command(short_help="Say what is in the way of overlap, and what to do about it.")
def doctor(  # noqa: PLR0913  # one for each option of the command line
    target: given.Target,
    backend: given.TrialBackend = "inductor",
    steps: given.TrialSteps = 3,
    ranks: given.TrialRanks = 2,
    bucket_cap_mb: given.CapMb = None,
    bucket_cap_mb_list: given.CapMbList = None,
    find_unused_parameters: given.FindUnused = None,
    static_graph: given.StaticGraph = None,
    json: given.Json = None,
) -> None:
    """Run a model under DDP, eager and compiled, and say what is in the way of overlap.

    Graph breaks, recompiles, compile time, buckets, unused parameters and options, each with the next step
    to take. It runs in this process alone, on a process group of one rank. With inductor it may take minutes,
    for nothing is taken from a cache; '--backend aot_eager' is quick.
    """
    from ddpopt.cases.case import resolve
    from ddpopt.cli.validation import require_writable
    from ddpopt.doctor import diagnose

    require_writable("--json", json)
    asked = given.ddp_arguments(bucket_cap_mb, bucket_cap_mb_list, find_unused_parameters, static_graph)
    case = resolve(target)
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints is no part of the report
        diagnosis = diagnose(
            case,
            given.overriding(case.ddp_kwargs, asked),
            backend=backend,
            steps=steps,
            ranks=ranks,
            tell=lambda doing: typer.echo(f"ddpopt: {doing}", err=True),
        )
    _show(diagnosis, json)


@app.command(short_help="Compare a compiled data-parallel step with eager DDP.")
def verify(  # noqa: PLR0913  # one for each option of the command line
    context: typer.Context,
    target: given.TargetIfAny = None,
    nproc: given.Nproc = 2,
    strategy: given.Strategy = "auto",
    backend: given.BackendIfAny = None,
    mode: given.Modes = None,
    options: given.Options = None,
    steps: given.Steps = 3,
    dtype: given.Dtype = None,
    device: given.Device = None,
    timeout: given.Limit = 3600.0,
    trial_timeout: given.TrialLimit = 300.0,
    bucket_cap_mb: given.CapMb = None,
    bucket_cap_mb_list: given.CapMbList = None,
    find_unused_parameters: given.FindUnused = None,
    static_graph: given.StaticGraph = None,
    matrix: given.Matrix = False,
    self_test: given.SelfTest = False,
    locate: given.Locate = True,
    locate_timeout: given.LocateLimit = 120.0,
    reproduction: given.Reproduction = None,
    json: given.Json = None,
    junit: given.Junit = None,
    html: given.Html = None,
    github: given.Github = False,
) -> None:
    """Train a model for some steps in eager DDP and compiled, and compare everything.

    Gradients, buckets, collectives, buffers, random numbers and the number of compilations, on every rank.
    Tolerances are derived and not guessed. Whatever is wrong is named by parameter, bucket, rank and level.
    """
    from ddpopt.cli import verify as cli_verify
    from ddpopt.cli.validation import require_heeded

    asked = given.ddp_arguments(bucket_cap_mb, bucket_cap_mb_list, find_unused_parameters, static_graph)
    _require_one_of(target is not None, matrix, self_test)
    files = cli_verify.Files(json, junit, html, github)
    if self_test:
        raise typer.Exit(cli_verify.self_test(nproc, files, _given(context)))
    require_heeded(_given(context))
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
        trial_limit_s=trial_timeout,
        locate=locate,
        locate_limit_s=locate_timeout,
        reproduction=reproduction,
        ddp_kwargs=asked,
    )
    raise typer.Exit(cli_verify.run(request, files).exit_code)


@app.command(short_help="Compare plans, runs and ratios with a baseline.")
def gate(  # noqa: PLR0913  # one for each option of the command line
    baseline: given.BaselineFile,
    targets: given.TargetsIfAny = None,
    update: given.Update = False,
    only: given.Only = None,
    mode: given.GateModes = None,
    backend: given.GateBackend = None,
    nproc: given.GateNproc = None,
    steps: given.GateSteps = None,
    device: given.GateDevice = None,
    timed: given.Timed = None,
    tests: given.Collected = None,
    json: given.Json = None,
    github: given.Github = False,
) -> None:
    """Compare plans, graphs, collectives, margins, ratios and numbers of tests with a baseline.

    Whatever moved is told: from what, to what, for which case. What is measured, and how, stands in the
    baseline; the options below are for writing it with --update. Without one, the corpus is measured on two
    ranks with aot_eager, in both of ddpopt's modes.
    """
    from ddpopt.cli import gate as cli_gate

    request = cli_gate.Request(
        baseline=Path(baseline),
        update=update,
        only=cli_gate.words(only),
        targets=tuple(targets) if targets else None,
        modes=cli_gate.words(mode),
        backend=backend,
        nproc=nproc,
        steps=steps,
        device=device,
        timed=cli_gate.words(timed),
        collected=cli_gate.words(tests),
    )
    raise typer.Exit(cli_gate.run(request, json, github))


@app.command(short_help="Draw models, and search for one that a mode gets wrong.")
def fuzz(  # noqa: PLR0913  # one for each option of the command line
    minutes: given.Minutes = None,
    examples: given.Examples = None,
    seed: given.Seed = 0,
    mode: given.FuzzedModes = None,
    backend: given.ExactBackend = "aot_eager",
    nproc: given.FuzzRanks = 1,
    workers: given.Workers = 1,
    out: given.Out = "ddpopt-fuzz",
    database: given.Database = None,
    without: given.Without = None,
    blocks: given.Blocks = None,
    limit: given.ModelLimit = 120.0,
) -> None:
    """Draw models, and run each in eager DDP and in some modes, until time is up.

    Each new failure is written at once, as a case and a script. The same seed gives the same run; --out of a
    run that was interrupted goes on where it stopped.
    """
    from ddpopt.cli import fuzz as cli_fuzz

    request = cli_fuzz.Request(
        minutes,
        examples,
        seed,
        mode or cli_fuzz.MODES,
        backend,
        nproc,
        workers,
        out,
        database,
        without,
        blocks or (),
        limit,
    )
    raise typer.Exit(cli_fuzz.run(request))


@app.command(short_help="Make a model that fails small, and write a script that shows it.")
def minimize(
    case: given.CaseFile,
    out: given.Script = None,
    tries: given.Tries = 400,
    minutes: given.SearchMinutes = None,
    blocks: given.Blocks = None,
    limit: given.ModelLimit = 120.0,
) -> None:
    """Make a model that 'ddpopt fuzz' found small, with the same failure.

    What fails in another way is left alone. The script needs torch alone where the fault is torch's own.
    """
    from ddpopt.cli import minimize as cli_minimize

    raise typer.Exit(cli_minimize.minimize(case, out, tries, minutes, limit, blocks or ()))


@app.command(short_help="List the modes and options that 'verify' knows.")
def modes() -> None:
    """List the modes and options that 'ddpopt verify' knows."""
    from ddpopt.explanation.tables import Column, table
    from ddpopt.judge.modes import MODES
    from ddpopt.judge.options import OPTIONS

    for title, rows in (("mode", MODES), ("option", OPTIONS)):
        columns = [Column(title), Column("about", fills=True)]
        typer.echo(table(columns, [(row.name, row.about) for row in rows]))
        typer.echo()


@app.command(short_help="List the cases of the corpus.")
def cases() -> None:
    """List the cases of the corpus, each of which is a TARGET."""
    from ddpopt.cases import corpus
    from ddpopt.explanation.tables import Column, table

    columns = [Column("case"), Column("about", fills=True)]
    typer.echo(table(columns, [(case.name, case.about) for case in corpus.cases()]))


class _Report(Protocol):
    """What a command shows: ``str()`` is the text for people."""

    def to_json(self) -> str:
        """Return the report as JSON."""


def _show(report: _Report, json: str | None) -> None:
    """Print a report, and write it as JSON: to stdout in place of the text."""
    if json is not None:
        _write(json, report.to_json())
    if json != given.STDOUT:
        typer.echo(str(report))


def _given(context: typer.Context) -> list[str]:
    """The parameters that stand on the command line."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return [name for name, source in sources if source is not None and source.name == "COMMANDLINE"]


def _require_one_of(*wholes: bool) -> None:
    if sum(wholes) != 1:
        raise UsageError(
            f"expected one of TARGET, --matrix and --self-test, got {sum(wholes) or 'none'} of them; "
            "see 'ddpopt verify --help'"
        )


def _write(file: str, text: str) -> None:
    if file == given.STDOUT:
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
