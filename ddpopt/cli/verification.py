"""``ddpopt verify`` and ``ddpopt matrix``: turn names into requests to the judge, and write its reports.

Invariant: every name is looked up before a rank is started.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from ddpopt.cases.matrix import CASES
from ddpopt.cases.option_cases import differing
from ddpopt.cases.targets import resolve
from ddpopt.cli.options import chosen
from ddpopt.dynamo.backends import backend_of
from ddpopt.judge.engines.meshes import Sizes, require_parts
from ddpopt.judge.engines.modes import MODES, engines
from ddpopt.judge.engines.names import mode_of
from ddpopt.judge.locating.locate import locate
from ddpopt.judge.report import write_report
from ddpopt.judge.report.text import verdict_text
from ddpopt.judge.report.wording import headline
from ddpopt.judge.training.options import OPTIONS
from ddpopt.judge.trials.on_rank import Request, Settings, Started
from ddpopt.judge.trials.runner import (
    OPTIONS_BY_DEFAULT,
    checked,
    is_first,
    ranks_to_start,
    verify_all,
    verify_and_locate,
)
from ddpopt.judge.verdict import Location, Trial, Verdict
from ddpopt.terminal.files import show
from ddpopt.terminal.status import status_line

REPRODUCTION = "ddpopt_reproduction.py"
"""File name of the script that shows the fault."""


@dataclass(frozen=True)
class Verification:
    """The request of the command line, as text.

    Attributes:
        nproc: the number of ranks, if it was given.
        simulate: the number of simulated ranks; None for none.
        trajectory: the number of steps to train freely, too; None for none.
        backend: the Dynamo backend.
        modes: comma-separated names, ``all``, or None for ddpopt's own.
        options: the same for ways to use DDP; None for only the target's own.
        steps: the number of training steps.
        timeout_s: limit of one trial, in seconds.
        json: file for JSON.
        reports: files for reports.
        dtype: the dtype to compute in.
        device: the device to compute on.
        mesh: the mesh; None if each rank trains a whole model.
        engines: the user's engines, judged with `modes`.
    """

    nproc: int | None
    backend: str
    modes: str | None
    options: str | None
    steps: int
    timeout_s: float
    json: str | None
    reports: tuple[str, ...]
    dtype: str | None = None
    device: str | None = None
    mesh: Sizes | None = None
    engines: tuple[str, ...] = ()
    simulate: int | None = None
    trajectory: int | None = None

    def of_target(self, target: str, ddp_kwargs: Mapping[str, Any], *, locate: bool) -> int:
        """Verify one target, and locate a fault if requested.

        Returns:
            The exit code.
        """
        case = resolve(target)
        require_parts(case, self.mesh)
        requests = self._requests([differing(case, ddp_kwargs) if ddp_kwargs else target])
        search = partial(self._locate, target, ddp_kwargs) if locate and self.mesh is None else None
        title = case.name
        del case  # it may hold a model
        return self._run(title, requests, search)

    def of_matrix(self) -> int:
        """Verify the matrix's own cases, and return the exit code."""
        return self._run(f"{len(CASES)} cases", self._requests(CASES), None)

    @property
    def _nproc(self) -> int | None:
        return ranks_to_start(self.nproc, self.simulate, self.mesh)

    @property
    def _settings(self) -> Settings:
        return Settings(
            backend_of(self.backend),
            self.steps,
            self.dtype,
            self.timeout_s,
            self.mesh,
            self.simulate or 0,
            self.trajectory or 0,
        )

    def _requests(self, cases: Sequence[Any]) -> list[Request]:
        builtin = [known.name for known in MODES]
        of_others = {*(self.modes or "").split(",")} - {*builtin}
        known = [each.name for each in engines()] if of_others - {""} else builtin
        named = chosen(self.modes, known, "--mode")
        modes = (*named, *self.engines) or (mode_of("auto"),)
        options = chosen(self.options, [known.name for known in OPTIONS], "--options")
        requests = [Request(case, name, modes) for case in cases for name in options or OPTIONS_BY_DEFAULT]
        checked(requests, self._settings, self._nproc)
        return requests

    def _run(self, title: str, requests: list[Request], find: Callable[[Trial, int], Location] | None) -> int:
        def verify() -> Verdict:
            trials = sum(len(one.modes) for one in requests) * len(self._settings.ways)
            with status_line("starting ranks") as show_line:

                def hear(event: object) -> None:
                    if isinstance(event, Started) and event.mode:
                        trial = f"{event.case}: {event.mode} / {event.option}{event.way}"
                        show_line(f"{event.index + 1} of {trials}: {trial}")

                return verify_all(
                    title,
                    requests,
                    self._settings,
                    nproc=self._nproc,
                    device=self.device,
                    limit_s=self.timeout_s * (trials + len(requests)),
                    on_event=hear,
                )

        return verify_and_locate(verify, find, self._report).exit_code

    def _locate(self, target: str, ddp_kwargs: Mapping[str, Any], trial: Trial, ranks: int) -> Location:
        if is_first():
            typer.echo(f"looking for where it goes wrong: {trial.name}", err=True)
        return locate(
            target,
            trial,
            Path(REPRODUCTION),
            nproc=ranks,
            steps=trial.trajectory or self.steps,
            dtype=self.dtype,
            device=self.device,
            backend=self.backend,
            ddp_kwargs=ddp_kwargs,
        )

    def _report(self, verdict: Verdict) -> None:
        text = verdict_text(verdict)
        reports = [partial(write_report, file, verdict, headline(verdict), text) for file in self.reports]
        show(text, verdict.to_json(), self.json, reports)
