"""The baseline: a file under version control that says what a commit must leave as it was.

Plans and graphs are Dynamo's and differ between releases of torch, so figures stand under the release that
they were measured with, and several may stand beside each other.

Invariant: equal figures give equal text, keys sorted, so that a diff shows what moved and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpopt.errors import UsageError
from ddpopt.gate.bands import Bands
from ddpopt.gate.figures import Figures
from ddpopt.gate.measuring import Settings

FORMAT = 1
KEY = "ddpopt_gate"


@dataclass(frozen=True)
class Baseline:
    """What the file says.

    Attributes:
        settings: what is measured, and how.
        bands: how far a figure may stray.
        tests: by folder, how many tests pytest collects, with any release of torch.
        measured: by release of torch (``"torch 2.13"``) the figures.
    """

    settings: Settings
    bands: Bands = field(default_factory=Bands)
    tests: Mapping[str, int] = field(default_factory=dict)
    measured: Mapping[str, Figures] = field(default_factory=dict)

    def figures(self, release: str, file: Path) -> Figures:
        """The figures of a release of torch.

        Args:
            release: as `release_of` names it.
            file: where the baseline stands, for the message.

        Raises:
            UsageError: there are none.
        """
        if release not in self.measured:
            known = ", ".join(sorted(self.measured)) or "none"
            raise UsageError(
                f"{file}: expected figures of {release}, which runs here, found {known}. Plans and graphs "
                f"differ between releases of torch: install one that is there, or run 'ddpopt gate "
                f"--baseline {file} --update' under {release}, which puts its figures beside the others"
            )
        return replace(self.measured[release], tests=self.tests)

    def with_figures(self, release: str, figures: Figures) -> Baseline:
        """The baseline with other figures of one release; those of others stay."""
        measured = {**self.measured, release: replace(figures, tests={})}
        return replace(self, tests=dict(figures.tests), measured=measured)

    def to_text(self) -> str:
        """What to write to the file."""
        data = {
            KEY: FORMAT,
            "settings": self.settings.to_data(),
            "bands": asdict(self.bands),
            "tests": dict(self.tests),
            "measured": {release: figures.to_data() for release, figures in self.measured.items()},
        }
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
        file: where it stands.

    Returns:
        The baseline; None if there is no such file.

    Raises:
        UsageError: the file is something else.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: expected a baseline that 'ddpopt gate' wrote: {error}") from error
    if not isinstance(data, dict) or data.get(KEY) != FORMAT:
        found = data.get(KEY) if isinstance(data, dict) else type(data).__name__
        raise UsageError(f"{file}: expected a JSON object with {KEY}={FORMAT}, found {found!r}")
    try:
        return _from_data(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{file}: expected a baseline as 'ddpopt gate --update' writes it, got another: "
            f"{type(error).__name__}: {error}"
        ) from error


def _from_data(data: Mapping[str, Any]) -> Baseline:
    return Baseline(
        Settings.from_data(data["settings"]),
        Bands(**data["bands"]),
        data["tests"],
        {release: Figures.from_data(found, {}) for release, found in data["measured"].items()},
    )


def write(baseline: Baseline, file: Path) -> bool:
    """Write a baseline, unless the file says the same already.

    Args:
        baseline: what to write.
        file: where to.

    Returns:
        Whether the file is another one now.

    Raises:
        UsageError: the file cannot be written.
    """
    text = baseline.to_text()
    try:
        if file.exists() and file.read_text(encoding="utf-8") == text:
            return False
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--baseline: cannot write {str(file)!r}: {error.strerror}; name a file that can be"
        ) from error
    return True
