"""What ci/gpu.sh knows and writes: the machine, and one page from the folder of JSON.

``python -m ci.gpu machine FOLDER`` writes machine.json; ``python -m ci.gpu page FOLDER`` reads what the parts
left, and writes page.md, and docs/data/gpu.txt too. With ``--dry-run``, no GPU and no page of the docs.

Invariant: the page claims nothing that no file says; a part that did not end says so.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
from junitparser import JUnitXml

KEPT = Path(__file__).parents[1] / "docs" / "data" / "gpu.txt"
PARTS = ("tests", "judge", "steps", "trace")


def machine(*, dry_run: bool) -> dict[str, Any]:
    """The machine and the versions, and on how many ranks tests and judge run.

    Raises:
        SystemExit: there is no GPU, and it is no dry run.
    """
    gpus = [] if dry_run else [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    if not gpus and not dry_run:
        sys.stderr.write(f"ci/gpu.sh: expected a GPU, got torch {torch.__version__}, which sees none\n")
        raise SystemExit(2)
    nccl: Any = torch.cuda.nccl  # torch does not type it
    git = ["git", "-C", str(KEPT.parent), "rev-parse", "--short", "HEAD"]
    return {
        "date": date.today().isoformat(),
        "commit": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if gpus else None,
        "python": platform.python_version(),
        "gpus": gpus,
        "ranks": min(2, len(gpus)) or 2,
        "sends": "nccl" if gpus else "gloo",
    }


def page(folder: Path) -> str:
    """The page, as Markdown without a title.

    Args:
        folder: has machine.json, ``parts``, and what the parts wrote.
    """
    known = _read(folder / "machine.json")
    device = ", ".join(known["gpus"]) or "no GPU: a dry run on the CPU"
    lines = [
        f"Run of {known['date']} at {known['commit']}: {device}; torch {known['torch']}, CUDA "
        f"{known['cuda']}, NCCL {known['nccl']}, Python {known['python']}; {known['ranks']} rank(s), "
        f"{known['sends']}.",
        "",
        "| part | exit code | seconds | result |",
        "|---|---|---|---|",
    ]
    said = {"tests": _tests, "judge": _judge, "steps": _claims, "trace": _trace}
    for name in PARTS:
        file = folder / "parts" / f"{name}.json"
        part = _read(file) if file.exists() else {"exit_code": "did not run", "seconds": "–"}
        try:
            result = said[name](folder)
        except (OSError, ValueError, KeyError) as error:
            result = f"no result: {type(error).__name__}"
        lines.append(f"| {name} | {part['exit_code']} | {part['seconds']} | {result} |")
    return "\n".join([*lines, "", *_steps(folder)]) + "\n"


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _tests(folder: Path) -> str:
    results = [case.result for suite in JUnitXml.fromfile(str(folder / "tests.xml")) for case in suite]
    kinds = Counter(type(result[0]).__name__.lower() if result else "passed" for result in results)
    return _counted(kinds)


def _judge(folder: Path) -> str:
    return _counted(Counter(trial["status"] for trial in _read(folder / "judge.json")["trials"]))


def _claims(folder: Path) -> str:
    claims = [claim for section in _sections(folder) for claim in section["claims"]]
    measured = [claim["held"] for claim in claims if claim["found"] is not None]
    return _counted(Counter("held" if held else "not held" for held in measured)) or "not judged"


def _trace(folder: Path) -> str:
    return f"{len(_read(folder / 'trace.json')['traceEvents'])} events"


def _counted(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def _sections(folder: Path) -> list[Any]:
    found = _read(folder / "steps.json")
    return found if isinstance(found, list) else [found]


def _steps(folder: Path) -> Iterator[str]:
    """The tables of step times and peak memory."""
    for grid in (
        (g for s in _sections(folder) for g in s["grids"]) if (folder / "steps.json").exists() else ()
    ):
        yield from (
            grid["title"],
            "",
            f"| {' | '.join(grid['columns'])} |",
            "|---" * len(grid["columns"]) + "|",
        )
        yield from (f"| {' | '.join(row)} |" for row in grid["rows"])
        yield ""


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(prog="python -m ci.gpu")
    parser.add_argument("command", choices=("machine", "page"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args()
    if asked.command == "machine":
        text = json.dumps(machine(dry_run=asked.dry_run), indent=2)
        (asked.folder / "machine.json").write_text(text, encoding="utf-8")
        return
    text = page(asked.folder)
    for file in (asked.folder / "page.md", *([] if asked.dry_run else [KEPT])):
        file.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
