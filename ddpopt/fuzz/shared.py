"""Failures that several machines share: in a database of Hypothesis's, by its own classes.

Invariant: nothing is read from a database but cases, each read as a file would be; what is no case of this
version is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    InMemoryExampleDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)

from ddpopt.errors import UsageError
from ddpopt.fuzz.cases import FoundCase

KEY = b"ddpopt fuzz 1"


def open_database(text: str | None) -> ExampleDatabase:
    """Open what ``--database`` names.

    Args:
        text: a folder, or ``redis://host:port/number``; several with commas between: the first is written to,
            all are read. None keeps failures to this process.

    Raises:
        UsageError: Redis is named, and its client is not installed.
    """
    if text is None:
        return InMemoryExampleDatabase()
    own, *others = [_opened(part.strip()) for part in text.split(",")]
    return MultiplexedDatabase(own, *map(ReadOnlyDatabase, others)) if others else own


def _opened(text: str) -> ExampleDatabase:
    if not text:
        raise UsageError("--database: expected a folder or redis://host:port/number, got nothing")
    if not text.startswith(("redis://", "rediss://", "unix://")):
        return DirectoryBasedExampleDatabase(Path(text))
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis  # type: ignore[import-not-found, unused-ignore]  # who wants it installs it
    except ImportError as error:
        raise UsageError(
            f"--database: {text!r} needs a client for Redis; 'pip install redis', or name a folder"
        ) from error
    return RedisExampleDatabase(Redis.from_url(text))


def share(database: ExampleDatabase, case: FoundCase) -> None:
    """Let other machines have a case."""
    database.save(KEY, case.to_json().encode())


def shared(database: ExampleDatabase) -> Iterator[FoundCase]:
    """All cases in a database, in an order that depends on nothing else."""
    for data in sorted(database.fetch(KEY)):
        try:
            yield FoundCase.from_json(data.decode())
        except (UsageError, UnicodeDecodeError):
            continue
