"""The baseline: a file under version control with the figures that a commit must not change.

Plans and graphs depend on Dynamo and differ between releases of torch, so figures belong to the release they
were measured with. A file may hold figures for several.

Invariant: equal figures give equal text, keys sorted, so a diff shows only what changed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpopt.cases.corpus import cases
from ddpopt.errors import UsageError
from ddpopt.terminal import files

FORMAT = 2
KEY = "ddpopt_gate"
CORPUS = "corpus"
Figure = str | int | float | list[str]
Figures = Mapping[str, Mapping[str, Mapping[str, Figure]]]
"""The figures by case, then by ``"plan"`` or the name of a mode."""


def named(targets: Sequence[str]) -> tuple[str, ...]:
    """Every target once, by its own name; ``"corpus"`` stands for every case of the corpus."""
    each = ([case.name for case in cases()] if target == CORPUS else [target] for target in targets)
    return tuple(dict.fromkeys(name for names in each for name in names))


@dataclass(frozen=True)
class Measuring:
    """What is measured, and how; stored in the baseline, so that two runs measure the same.

    Attributes:
        targets: as on the command line.
        modes: names of the modes.
        backend: the Dynamo backend.
        nproc: the number of ranks.
        steps: the number of training steps.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU for each rank if there are enough.
        trajectory: the number of steps that are also trained freely; 0 for none.
    """

    targets: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("ddpopt-split", "ddpopt-inline")
    backend: str = "aot_eager"
    nproc: int = 2
    steps: int = 3
    device: str | None = None
    trajectory: int = 0


@dataclass(frozen=True)
class Baseline:
    """The contents of the file.

    Attributes:
        settings: what is measured, and how.
        measured: the figures by release of torch (``"torch 2.13"``).
    """

    settings: Measuring = field(default_factory=Measuring)
    measured: Mapping[str, Figures] = field(default_factory=dict)

    def figures(self, release: str, file: Path) -> Figures:
        """The figures of a release of torch.

        Args:
            release: as `release_of` names it.
            file: the baseline file, for the message.

        Raises:
            UsageError: there are none.
        """
        if release not in self.measured:
            known = ", ".join(sorted(self.measured)) or "none"
            raise UsageError(
                f"{file}: expected figures for {release}, which is running here, found {known}. Plans and "
                "graphs differ between releases of torch: install one that the baseline has, or run "
                f"'ddpopt gate --baseline {file} --update' under {release}, which adds them"
            )
        return self.measured[release]

    def with_figures(self, release: str, figures: Figures) -> "Baseline":
        """The baseline with new figures for one release; those of other releases stay."""
        return replace(self, measured={**self.measured, release: figures})

    def to_text(self) -> str:
        """The text to write to the file."""
        settings = asdict(self.settings)
        if not self.settings.trajectory:  # as in files of versions that had none
            del settings["trajectory"]
        data = {KEY: FORMAT, "settings": settings, "measured": self.measured}
        return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"


def release_of(version: str) -> str:
    """Name a release of torch by the part of its version that decides what Dynamo does.

    >>> release_of("2.13.0+cpu")
    'torch 2.13'
    """
    return f"torch {'.'.join(version.split('.')[:2])}"


def read(file: Path) -> Baseline | None:
    """Read a baseline.

    Args:
        file: where it is.

    Returns:
        The baseline; None if there is no such file.

    Raises:
        UsageError: the file is not a baseline.
    """
    try:
        if file.exists() and not file.is_file():  # a device may have no end
            raise ValueError("not a regular file")
        data = json.loads(file.read_text(encoding="utf-8"))
        if data[KEY] != FORMAT:
            raise ValueError(f"{KEY} is {data[KEY]!r}, expected {FORMAT}")
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in data["settings"].items()
        }
        return Baseline(Measuring(**settings), data["measured"])
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{file}: expected a baseline that this version of 'ddpopt gate --update' wrote: "
            f"{type(error).__name__}: {error}; write it again under another name, and compare the two"
        ) from error


def write(baseline: Baseline, file: Path) -> bool:
    """Write a baseline, unless the file already has this content; makes its folder.

    Args:
        baseline: what to write.
        file: the file to write.

    Returns:
        Whether the file has changed.

    Raises:
        UsageError: the file cannot be written.
    """
    text = baseline.to_text()
    if file.exists() and file.read_text(encoding="utf-8") == text:
        return False
    files.write("--baseline", file, text)
    return True
