"""What every subcommand does: check arguments, keep stdout for results, and turn errors into exit codes."""

import sys
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ddpopt.cli.options import require_usable
from ddpopt.errors import DdpoptError, UsageError
from ddpopt.ranks.environment import has_launched_peers, own_rank
from ddpopt.terminal.files import RESULTS, require_writable


class Command(TyperCommand):
    """A subcommand whose stdout has only its result, whatever the target prints."""

    def invoke(self, ctx: Any) -> Any:
        """Check the arguments, then run the command."""
        require_usable(ctx.params)
        if not has_launched_peers() or own_rank() == 0:  # the first rank writes
            require_writable(_outputs_of(ctx.params))
        RESULTS.set(sys.stdout)
        sys.stdout = sys.stderr  # for good: a target may also print when the process ends
        return super().invoke(ctx)


class CommandGroup(TyperGroup):
    """The command, with ddpopt's errors turned into messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; an error of ddpopt ends with its exit code."""
        try:
            return self._invoke(ctx)
        except DdpoptError as error:
            _tell(f"{error}{_raised_at(error)}")
            raise typer.Exit(error.exit_code) from error
        except SystemExit as error:  # raised by the target's code; it must not look like success
            from ddpopt.cases.targets import users_line  # heavy, but already loaded at this point

            ended = f"the target called sys.exit({error.code!r}){users_line(error)}; make it return instead"
            _tell(ended)
            raise typer.Exit(UsageError.exit_code) from error

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (AttributeError, ImportError):  # modules of ddpopt use private names of torch when imported
            from ddpopt.torch_private import require_supported

            require_supported()
            raise


def _tell(problem: str) -> None:
    """Print a problem; none of torchrun's ranks waits for this one, and what all have is printed once."""
    if has_launched_peers():
        from ddpopt.ranks.arrival import tells  # heavy

        if not tells(problem):
            return
    typer.echo(f"ddpopt: error: {problem}", err=True)


def _raised_at(error: DdpoptError) -> str:
    """The line of the user's code that an error began in, if its message does not have it."""
    if error.__cause__ is None:
        return ""
    from ddpopt.cases.targets import users_line  # heavy

    line = users_line(error.__cause__)
    return "" if line in str(error) else f"\nThe last line of your code that ran:{line}"


def _outputs_of(params: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Each file that a command will write, with its option."""
    outputs = [(f"--{name}", params.get(name)) for name in ("json", "trace", "html")]
    outputs += [("--report", file) for file in params.get("report") or ()]
    if params.get("update"):
        outputs.append(("--baseline", params.get("baseline")))
    if params.get("case"):  # of 'ddpopt minimize'
        outputs.append(("--out", params.get("out")))
    return outputs
