"""``python -m tests.selftest``: put faults in, and count which of them the verification finds."""

import argparse
import itertools
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from ddpopt.errors import DdpoptError, UsageError
from ddpopt.judge.report.files import status_line
from ddpopt.judge.trials import Started
from tests.selftest.clean_runs import clean_runs
from tests.selftest.faults import FAULTS
from tests.selftest.self_test import SelfTest, self_test


def main(arguments: list[str] | None = None) -> int:
    """Run it, and return the exit code.

    0 if every fault was found and no clean run raised anything, 1 if not, 2 for arguments that cannot be
    used, 3 if there were no ranks.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.selftest", description=__doc__)
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--json", type=Path, help="write JSON to this file")
    parser.add_argument(
        "--faults", metavar="PATTERN", help='such as "a bucket *": these alone, no clean runs'
    )
    given = parser.parse_args(arguments)
    try:
        result = _run(given.nproc, given.faults)
    except DdpoptError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if given.json:
        given.json.write_text(f"{result.to_json()}\n", encoding="utf-8")
    sys.stdout.write(f"{result}\n")
    return 0 if result else 1


def _run(nproc: int, pattern: str | None) -> SelfTest:
    faults = [fault for fault in FAULTS if fnmatchcase(fault.name, pattern or "*")]
    if not faults:
        raise UsageError(f"--faults: expected a pattern that some name matches, got {pattern!r}")
    clean = {} if pattern else clean_runs()
    total = len(faults) + sum(len(asked.modes) for runs in clean.values() for asked in runs)
    begun = itertools.count(1)
    with status_line("starting ranks") as show_line:

        def hear(event: object) -> None:
            if isinstance(event, Started) and event.mode:
                show_line(f"{next(begun)} of {total}: {event.case}: {event.mode} / {event.option}")

        return self_test(nproc, faults=faults, clean=clean, on_event=hear)


if __name__ == "__main__":
    raise SystemExit(main())
