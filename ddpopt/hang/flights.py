"""Dumps of torch's flight recorder, as data.

torch records each collective of each process group with its sequence number, sizes, dtype and Python stack.
The format is torch's own, so these dumps also open in its ``torchfrtrace``.

Invariant: reading a dump runs nothing that is in it, though it is a pickle.
"""

import ast
import io
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpopt.errors import UsageError

PREFIX = "rank_"
"""How the names of the recorder's files begin; the rank follows."""
OF_LIBRARIES = ("/torch/", "/ddpopt/", "/multiprocessing/", "/threading.py", "/runpy.py", "<")
"""Parts of the names of files that are not the user's."""
RANK = re.compile(r"(\d+)\D*$")


@dataclass(frozen=True)
class RecordedCollective:
    """One collective that a rank entered.

    Attributes:
        group: name of its process group.
        number: sequence number among the collectives of that group, from 1.
        kind: what it does: ``"all_reduce"``.
        tensors: the sizes and dtypes of what it sends: ``"Float [7]"``.
        line: the innermost line of the user's code: ``"train.py:13 in main"``; empty if there is none.
        is_over: whether it has completed; None if the recorder does not say.
    """

    group: str
    number: int
    kind: str
    tensors: str
    line: str = ""
    is_over: bool | None = None

    def __str__(self) -> str:
        return f"{self.kind} of {self.tensors}" if self.tensors else self.kind


@dataclass(frozen=True)
class Flight:
    """What one rank's recorder holds.

    Attributes:
        rank: the rank.
        sent: its collectives, in the order in which they were entered.
        groups: the ranks of each of its process groups, by name.
    """

    rank: int
    sent: tuple[RecordedCollective, ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class _Plain(pickle.Unpickler):
    """Reads containers, numbers and text, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse a class or a function, which loading would call."""
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read(paths: Sequence[str | Path]) -> list[Flight]:
    """Read dumps.

    Args:
        paths: files, whose names end with the rank, as torch writes them; or folders with nothing else.

    Returns:
        A flight for each file, by rank.

    Raises:
        UsageError: a file cannot be read, is no dump, or has no rank or another one's in its name.
    """
    flights: dict[int, Flight] = {}
    for file in _files(paths):
        found = RANK.search(file.name)
        if found is None:
            raise UsageError(f"hang: expected a name that ends with the rank, such as rank_3, got {file}")
        rank = int(found[1])
        if rank in flights:
            raise UsageError(f"hang: expected one dump of each rank, got two of rank {rank}: {file}")
        flights[rank] = flight_of(_loaded(file), rank)
    if not flights:
        raise UsageError("hang: expected dumps, got none")
    return [flights[rank] for rank in sorted(flights)]


def _files(paths: Iterable[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():  # a hidden file was not finished
            files += sorted(each for each in path.iterdir() if each.is_file() and each.name[0] != ".")
        else:
            files.append(path)
    return files


def _loaded(file: Path) -> Mapping[str, Any]:
    try:
        dump: object = _Plain(io.BytesIO(file.read_bytes())).load()
    except OSError as error:
        raise UsageError(f"hang: {file}: {error.strerror or error}") from error
    except Exception as error:  # any bytes may be a pickle that fails in any way
        raise UsageError(f"hang: expected a dump of torch's flight recorder, got {file}: {error}") from error
    if not isinstance(dump, Mapping) or not isinstance(dump.get("entries"), list):
        raise UsageError(f"hang: expected a dump of torch's flight recorder, with entries, got {file}")
    return dump


def flight_of(dump: Mapping[str, Any], rank: int, last: int | None = None) -> Flight:
    """A dump as data, without what was sent in groups that were made again under the same name.

    Args:
        dump: as torch pickles it.
        rank: the rank that it is of.
        last: how many collectives to keep at most; by default all.
    """
    entries = sorted(dump["entries"], key=lambda entry: entry["record_id"])
    newest = {entry["process_group"][0]: entry["pg_id"] for entry in entries}
    kept = [
        entry
        for entry in entries
        if not entry.get("is_p2p") and entry["pg_id"] == newest[entry["process_group"][0]]
    ]
    sent = tuple(_sent(entry) for entry in (kept if last is None else kept[-last:]))
    return Flight(rank, sent, dict(_groups(dump.get("pg_config", {}))))


def _groups(configured: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for group in configured.values():
        ranks = ast.literal_eval(group.get("ranks", "[]"))
        if ranks:
            yield _named(group["name"], group["desc"]), tuple(ranks)


def _named(name: str, about: str) -> str:
    return f"{name} ({about})" if about and about != "undefined" else name


def _sent(entry: Mapping[str, Any]) -> RecordedCollective:
    name, about = entry["process_group"]
    backend, _, kind = entry["profiling_name"].rpartition(":")
    sizes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    return RecordedCollective(
        group=_named(str(name), about),
        number=entry["collective_seq_id"],
        kind=kind,
        tensors=", ".join(f"{dtype} {size}" for dtype, size in sizes),
        line=_line(entry.get("frames", ())),
        is_over=entry.get("retired") if backend == "gloo" else entry["state"] == "completed",
    )


def _line(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line of the user's code."""
    for frame in frames:
        file = str(frame["filename"])
        if not any(part in file for part in OF_LIBRARIES):
            return f"{Path(file).name}:{frame['line']} in {frame['name']}"
    return ""
