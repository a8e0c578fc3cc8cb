"""What was measured, as JSON: a document says what it is, and is refused if it has impossible numbers."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from ddpopt.errors import UsageError

FORMAT = 2
LEAST = {"busy": 1, "world_size": 1}
"""Of numbers that may not be 0."""
Record = TypeVar("Record")


@dataclass(frozen=True)
class Stored:
    """A record that is stored as a JSON object, with its kind and format."""

    def to_json(self) -> str:
        """This as JSON text; `from_json` returns an equal one."""
        return json.dumps({f"ddpopt_{type(self).__name__.lower()}": FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str, where: str = "") -> Self:
        """Read what `to_json` wrote, or what ``ddpopt tune --json`` wrote with it.

        Args:
            text: the document.
            where: it came from, for messages.

        Raises:
            UsageError: `text` is not such a document, or was written by another version.
        """
        kind = cls.__name__.lower()
        try:
            row = json.loads(text)
            row = dict(row.get(kind, row))
            if (found := row.pop(f"ddpopt_{kind}")) != FORMAT:
                raise ValueError(f"format {found!r}, which another version wrote; this one has {FORMAT}")
            return cls._of(row)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            got = f"got something else: {type(error).__name__}: {error}"
            raise UsageError(
                f"{where}expected a {kind} that ddpopt wrote, {got}. Measure it again"
            ) from error

    @classmethod
    def from_file(cls, option: str, file: str | os.PathLike[str]) -> Self:
        """Read a file that an option names; raises UsageError as `read` and `from_json` do."""
        return cls.from_json(read(option, file), f"{option} {os.fspath(file)}: ")

    @classmethod
    def _of(cls, row: dict[str, Any]) -> Self:
        return checked(cls(**row))


def checked(record: Record) -> Record:
    """A record whose numbers are finite and not negative; raises TypeError or ValueError for others."""
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if field.type in ("float", "int", int) and not LEAST.get(field.name, 0) <= value < math.inf:
            raise ValueError(f"{field.name} is {value!r}")
    return record


def read(option: str, file: str | os.PathLike[str]) -> str:
    """The text of a file.

    Raises:
        UsageError: it cannot be read; the message begins with `option`.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        came = f"cannot read {str(file)!r}: {error}"
        raise UsageError(f"{option}: {came}; name a file that ddpopt wrote") from error


def conditions() -> dict[str, str]:
    """The hardware and the versions of this process, by name."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    threads = str(torch.get_num_threads())
    return {"torch": str(torch.__version__), "host": platform.node(), "device": device, "threads": threads}
