"""Records that are stored as JSON objects: a plan, and what a step and a link were measured to cost.

Invariant: what is read back is equal to what was written; anything else is refused with the file's name.
"""

import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from ddpopt.errors import UsageError

_types = functools.cache(get_type_hints)


@dataclass(frozen=True)
class Stored:
    """A record that is stored as a JSON object, with its kind and format."""

    FORMAT: ClassVar[int] = 1

    def document(self) -> dict[str, Any]:
        """This as the JSON object that `from_json` reads."""
        return {f"ddpopt_{type(self).__name__.lower()}": self.FORMAT, **asdict(self)}

    def to_json(self) -> str:
        """This as JSON text; `from_json` returns an equal one."""
        return json.dumps(self.document(), indent=2)

    @classmethod
    def from_json(cls, text: str, where: str = "") -> Self:
        """Read what `to_json` wrote, alone or as a part of what a command wrote with ``--json``.

        Args:
            text: the document.
            where: it came from, for messages.

        Raises:
            UsageError: `text` is not such a document, or was written by another version.
        """
        kind = cls.__name__.lower()
        try:
            document = json.loads(text)
            document = document.get(kind, document)
            if (found := document[f"ddpopt_{kind}"]) != cls.FORMAT:
                raise ValueError(f"format {found!r}, which another version wrote; this one has {cls.FORMAT}")
            return cls._of(document)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            got = f"got something else: {type(error).__name__}: {error}"
            raise UsageError(f"{where}expected a {kind} that ddpopt wrote, {got}. Make it again") from error

    @classmethod
    def from_file(cls, option: str, file: str | os.PathLike[str]) -> Self:
        """Read a file that an option names; raises UsageError as `read` and `from_json` do."""
        return cls.from_json(read(option, file), f"{option} {os.fspath(file)}: ")

    @classmethod
    def _of(cls, document: dict[str, Any]) -> Self:
        record: Self = _built(cls, document)
        return record


def _built(kind: Any, value: Any) -> Any:
    """A value of a type from JSON, which has lists but no tuples; raises TypeError or ValueError."""
    if is_dataclass(kind):
        of: Any = kind
        types = _types(of)
        return of(**{f.name: _built(types[f.name], value[f.name]) for f in fields(of) if f.name in value})
    if get_origin(kind) is tuple:
        return tuple(_built(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is Mapping:
        return dict(value)
    if kind in (int, float) and not 0 <= value < math.inf:
        raise ValueError(f"expected a number, got {value!r}")
    return value


def read(option: str, file: str | os.PathLike[str]) -> str:
    """The text of a file.

    Raises:
        UsageError: it cannot be read; the message begins with `option`.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        came = f"cannot read {str(file)!r}: {error}"
        raise UsageError(f"{option}: {came}; name a file that ddpopt wrote") from error
