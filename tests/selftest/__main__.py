"""``python -m tests.selftest``: put faults in, and count which of them the verification finds."""

import argparse
import sys
from pathlib import Path

from ddpopt.judge.report.progress import StatusLine, counting
from ddpopt.judge.trials import Started
from tests.selftest.clean_runs import MODES, clean_runs
from tests.selftest.faults import FAULTS
from tests.selftest.self_test import self_test
from tests.selftest.text import self_test_text


def main() -> int:
    """Run it, and return the exit code: 0 if every fault was found and no clean run raised anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.selftest", description=__doc__)
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--json", type=Path, help="write JSON to this file")
    given = parser.parse_args()
    with StatusLine("starting ranks") as line:
        begin = counting(line, len(FAULTS) + len(clean_runs()) * len(MODES))

        def hear(event: object) -> None:
            if isinstance(event, Started) and event.mode:
                begin(f"{event.case}: {event.mode} / {event.option}")

        result = self_test(given.nproc, on_event=hear)
    if given.json:
        given.json.write_text(f"{result.to_json()}\n", encoding="utf-8")
    sys.stdout.write(f"{self_test_text(result)}\n")
    return result.as_verdict().exit_code


if __name__ == "__main__":
    raise SystemExit(main())
