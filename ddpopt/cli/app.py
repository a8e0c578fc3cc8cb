"""The ``ddpopt`` command: the options of each subcommand, and the part of the package that does the work.

Exit codes: 0 right, 1 the program under test is wrong, 2 usage, 3 not judged. A ddpopt error is printed to
stderr without a traceback. Heavy imports are inside the commands, so that help needs no torch.
"""

import functools
import json as json_module
import os
import sys
from collections.abc import Iterable
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer

import ddpopt
from ddpopt.cli import options as given
from ddpopt.cli.commands import Command, CommandGroup
from ddpopt.terminal.files import show, write_page
from ddpopt.terminal.status import status_line
from ddpopt.terminal.tables import Column, table

app = typer.Typer(
    cls=CommandGroup,
    help="Make torch.compile and DistributedDataParallel agree on gradient buckets.",
    epilog="Exit codes: 0 right, 1 the program under test is wrong, 2 usage, 3 not judged.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help and plain errors, the same in every terminal and every log
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddpopt {ddpopt.__version__}, torch {version_of('torch')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of ddpopt and torch.",
        ),
    ] = False,
) -> None:
    del version


@app.command(cls=Command, short_help="Show the plan, DDP's own buckets, and torch's DDPOptimizer.")
def explain(
    target: given.Target,
    strategy: given.Strategy = "auto",
    ddp: given.Ddp = None,
    profile: given.Profile = None,
    link: given.LinkFile = None,
    json: given.Json = None,
) -> None:
    """Show ddpopt's plan, DDP's own buckets, and what torch's DDPOptimizer does.

    Nothing is trained: no process group and no GPU is needed.
    """
    from ddpopt.explanation.explain import explain_case

    case = _case(target, ddp)
    planned: Any = "inline" if strategy == "step" else strategy  # a step's graph is known when it is captured
    explanation = explain_case(case, case.ddp_kwargs, planned)
    if profile is not None or link is not None:
        explanation = explanation.predicted(profile, link)
    show(str(explanation), explanation.to_json(), json)


@app.command(cls=Command, short_help="Find what prevents overlap, and say what to do about it.")
def doctor(  # one for each option of the command line
    target: given.Target,
    nproc: given.Nproc = given.NPROC,
    backend: given.Backend = given.BACKEND,
    steps: given.Steps = given.STEPS,
    ddp: given.Ddp = None,
    json: given.Json = None,
) -> None:
    """Run a model under DDP, eager and compiled, and say what prevents overlap.

    Graph breaks, recompiles, buckets, unused parameters and options, each with the next step to take. It runs
    in this process alone, with the inputs of --nproc ranks. Exit code 1 if a step fails or would train
    something else.
    """
    from ddpopt.doctor import diagnose

    case = _case(target, ddp)
    diagnosis = diagnose(
        case,
        backend=backend,
        steps=steps,
        ranks=nproc,
        tell=lambda doing: typer.echo(f"ddpopt: {doing}", err=True),
    )
    show(str(diagnosis), diagnosis.to_json(), json)
    raise typer.Exit(diagnosis.exit_code)


@app.command(cls=Command, short_help="Say where ranks hang, from what torch's flight recorder wrote.")
def hang(dumps: given.Dumps, world_size: given.HungRanks = None, json: given.Json = None) -> None:
    """Compare dumps of torch's flight recorder: where ranks differ first, and who is missing.

    A dump is a file for each rank, whose name ends with the rank. Exit code 1 if ranks differ or one left no
    dump, else 3: nothing is known to be wrong.
    """
    from ddpopt.hang import diagnose, read

    found = diagnose(read(dumps), world_size)
    show(str(found), found.to_json(), json)
    raise typer.Exit(found.exit_code)


@app.command(cls=Command, short_help="Find the buckets that make a training step shortest.")
def tune(  # noqa: PLR0913  # one for each option of the command line
    target: given.Target,
    nproc: given.Nproc = given.NPROC,
    backend: given.Backend = given.BACKEND,
    mode: given.TunedMode = "ddpopt-inline",
    link: given.LinkFile = None,
    device: given.Device = None,
    timeout: given.Timeout = given.TIMEOUT_S,
    ddp: given.Ddp = None,
    world_size: given.WorldSize = None,
    most_mb: given.MostMb = given.MOST_MB,
    trace: given.Trace = None,
    html: given.Html = None,
    json: given.Json = None,
) -> None:
    """Measure training steps and the link, and find the buckets with which a step is shortest.

    The table has DDP's default, the caps that are given with --ddp, and the tuned buckets. The JSON is a plan
    for ddpopt.compile(ddp_model, plan=FILE), with the profile and the link that it was made from.
    """
    from ddpopt.cli import tuning

    asked = tuning.Tuning(
        case=_case(target, ddp),
        nproc=nproc,
        device=device,
        timeout_s=timeout,
        mode=mode,
        backend=backend,
        link=link,
        world_size=world_size,
        most_mb=most_mb,
        json=json,
        trace=trace,
        html=html,
    )
    tuning.tune(asked)


@app.command(cls=Command, short_help="Measure what an all-reduce costs.")
def link(
    nproc: given.Nproc = given.NPROC,
    device: given.Device = None,
    timeout: given.Timeout = given.TIMEOUT_S,
    json: given.Json = None,
) -> None:
    """Measure all-reduces, and fit latency and bandwidth, for 'ddpopt tune --link FILE'."""
    from ddpopt.cli import tuning

    tuning.link(nproc, device, timeout, json)


@app.command(cls=Command, short_help="Compare a compiled data-parallel step with eager DDP.")
def verify(  # noqa: PLR0913  # one for each option of the command line
    target: given.Target,
    nproc: given.SomeNproc = None,
    simulate: given.Simulate = None,
    trajectory: given.Trajectory = None,
    backend: given.Backend = given.BACKEND,
    mode: given.Modes = None,
    engine: given.Engines = None,
    options: given.Options = None,
    steps: given.Steps = given.STEPS,
    dtype: given.Dtype = None,
    device: given.Device = None,
    mesh: given.Mesh = None,
    timeout: given.Timeout = given.TIMEOUT_S,
    ddp: given.Ddp = None,
    locate: given.Locate = True,
    json: given.Json = None,
    report: given.Reports = None,
) -> None:
    """Train a model for some steps in eager DDP and compiled, and compare everything.

    Gradients, buckets, collectives, buffers, random numbers and the number of compilations, on every rank.
    Tolerances are derived and not guessed. Whatever is wrong is named by parameter, bucket, rank and level.
    """
    from ddpopt.cli.verification import Verification
    from ddpopt.judge.engines.meshes import sizes_of

    verification = Verification(
        nproc=nproc,
        simulate=simulate,
        trajectory=trajectory,
        backend=backend,
        modes=mode,
        options=options,
        steps=steps,
        timeout_s=timeout,
        json=json,
        reports=tuple(report or ()),
        dtype=dtype,
        device=device,
        mesh=sizes_of(mesh),
        engines=tuple(engine or ()),
    )
    raise typer.Exit(verification.of_target(target, given.ddp_arguments(ddp or ()), locate=locate))


@app.command(cls=Command, short_help="Verify every mode under every option on six small cases.")
def matrix(  # noqa: PLR0913  # one for each option of the command line
    nproc: given.SomeNproc = None,
    simulate: given.Simulate = None,
    trajectory: given.Trajectory = None,
    backend: given.Backend = given.BACKEND,
    mode: given.Modes = None,
    engine: given.Engines = None,
    options: given.Options = None,
    steps: given.Steps = given.STEPS,
    timeout: given.Timeout = given.TIMEOUT_S,
    json: given.Json = None,
    report: given.Reports = None,
) -> None:
    """Verify modes under options on six small cases; by default all modes and all options.

    With '--backend eager' it takes minutes.
    """
    from ddpopt.cli.verification import Verification

    verification = Verification(
        nproc=nproc,
        simulate=simulate,
        trajectory=trajectory,
        backend=backend,
        modes=mode or "all",
        options=options or "all",
        steps=steps,
        timeout_s=timeout,
        json=json,
        reports=tuple(report or ()),
        engines=tuple(engine or ()),
    )
    raise typer.Exit(verification.of_matrix())


@app.command(cls=Command, short_help="Compare plans and runs with a baseline.")
def gate(  # noqa: PLR0913  # one for each option of the command line
    context: typer.Context,
    baseline: given.BaselineFile,
    targets: given.Targets = None,
    update: given.Update = False,
    nproc: given.Nproc = given.NPROC,
    backend: given.Backend = given.BACKEND,
    mode: given.Modes = None,
    steps: given.Steps = given.STEPS,
    trajectory: given.Trajectory = None,
    device: given.Device = None,
    json: given.Json = None,
    report: given.Reports = None,
) -> None:
    """Compare plans, graphs, collectives, overlap and verdicts with a baseline.

    Every change is reported: from what, to what, for which case. What is measured, and how, is in the
    baseline; --update writes it, with new targets and the options that are given.
    """
    from ddpopt.gate.gate import gate as compare
    from ddpopt.gate.page import page
    from ddpopt.judge.engines.modes import MODES

    asked: dict[str, Any] = {"nproc": nproc, "backend": backend, "steps": steps, "device": device}
    asked["trajectory"] = trajectory
    sources = {name: context.get_parameter_source(name) for name in asked}
    asked = {name: asked[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    if mode is not None:
        asked["modes"] = given.chosen(mode, [known.name for known in MODES], "--mode")
    with status_line("starting ranks") as show_line:
        compared = compare(
            Path(baseline),
            targets or (),
            asked,
            update=update,
            begin=lambda name, total: show_line(f"{name}, one of {total} cases"),
        )
    if compared is None:
        return  # the first of torchrun's ranks goes on
    comparison, renew = compared
    made = functools.partial(page, comparison)
    others: list[Any] = [functools.partial(write_page, file, made) for file in report or ()]
    others += [lambda: typer.echo(f"ddpopt: {renew()}", err=True)] if update else []
    show(str(comparison), comparison.to_json(), json, others)
    raise typer.Exit(0 if comparison.updates else comparison.exit_code)


@app.command(cls=Command, short_help="Draw random models, and search for one that a mode gets wrong.")
def fuzz(  # noqa: PLR0913  # one for each option of the command line
    minutes: given.Minutes = None,
    examples: given.Examples = None,
    seed: given.Seed = 0,
    mode: given.Modes = None,
    backend: given.Backend = given.BACKEND,
    nproc: given.Nproc = given.NPROC,
    out: given.Out = "ddpopt-fuzz",
    without: given.Without = None,
    timeout: given.Timeout = given.TIMEOUT_S,
    json: given.Json = None,
) -> None:
    """Draw models, and run each in eager DDP and in some modes, until time is up.

    Each new failure is written at once, as a case and a script. The same seed gives the same run; --out of a
    run that was interrupted resumes it. Exit code 1 if a mode failed, or with mode 'whole' the backend; 3 if
    too few models were judged.
    """
    from ddpopt.cli import fuzzing

    plan = fuzzing.planned(seed, mode, backend, nproc, without)
    raise typer.Exit(fuzzing.fuzz(plan, minutes, examples, timeout, out, json))


@app.command(cls=Command, short_help="Shrink a model that fails, and write a script that shows the failure.")
def minimize(
    case: given.CaseFile,
    out: given.Script = None,
    tries: given.Tries = 400,
    minutes: given.Minutes = None,
    timeout: given.Timeout = given.TIMEOUT_S,
    json: given.Json = None,
) -> None:
    """Make a model that 'ddpopt fuzz' found small, with the same failure.

    What fails in another way is left alone. The script needs torch alone where the fault is torch's own.
    Exit code 0 if the script shows the failure, 1 if it does not, 3 if CASE does not fail here.
    """
    from ddpopt.cli import fuzzing

    raise typer.Exit(fuzzing.minimize(case, out, tries, minutes, timeout, json))


@app.command(cls=Command, short_help="List the modes and options that 'verify' knows.")
def modes() -> None:
    """List the modes and options that 'ddpopt verify' and 'ddpopt matrix' know."""
    from ddpopt.judge.engines.modes import engines
    from ddpopt.judge.training.options import OPTIONS

    show(f"{_listed('mode', engines())}\n\n{_listed('option', OPTIONS)}", "", None)


@app.command(cls=Command, short_help="List the cases of the corpus.")
def cases(json: given.Json = None) -> None:
    """List the cases of the corpus, each of which is a TARGET."""
    from ddpopt.cases import corpus

    found = corpus.cases()
    show(_listed("case", found), json_module.dumps({case.name: case.about for case in found}, indent=2), json)


def _case(target: str, ddp: list[str] | None) -> Any:
    """The case that a target names, with other arguments for DDP."""
    from ddpopt.cases.option_cases import differing
    from ddpopt.cases.targets import resolve

    return differing(resolve(target), given.ddp_arguments(ddp or ()))


def _listed(title: str, rows: Iterable[Any]) -> str:
    """A table of names, with one sentence about each."""
    return table([Column(title), Column("about")], [(row.name, row.about) for row in rows])


def main() -> None:
    """Run the command; modules are looked for in the current directory too, after all other places."""
    sys.path.append(os.getcwd())
    if (stdout := sys.stdout) is None:
        sys.exit("ddpopt: error: stdout is closed; redirect it to a file, or to /dev/null")
    sys.stdout = open(os.dup(1), "w", encoding=stdout.encoding, errors=stdout.errors)  # noqa: SIM115
    vars(sys)["__stdout__"] = sys.stdout  # whose terminal's width counts
    os.dup2(2, 1)  # what the target's own processes and libraries print
    app(prog_name="ddpopt")
