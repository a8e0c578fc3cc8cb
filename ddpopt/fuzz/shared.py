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
REDIS = ("redis://", "rediss://", "unix://")


def open_database(text: str | None) -> ExampleDatabase:
    """Open what ``--database`` names.

    Args:
        text: a folder, or ``redis://host:port/number``; several with commas between: the first is written to,
            all are read. None keeps failures to this process.

    Raises:
        UsageError: it is neither, or a Redis that does not answer or whose client is not installed.
    """
    if text is None:
        return InMemoryExampleDatabase()
    own, *others = [_opened(part.strip()) for part in text.split(",")]
    return MultiplexedDatabase(own, *map(ReadOnlyDatabase, others)) if others else own


def _opened(text: str) -> ExampleDatabase:
    if not text:
        raise UsageError("--database: expected a folder or redis://host:port/number, got nothing")
    if not text.startswith(REDIS):
        return _folder(text)
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis, RedisError  # type: ignore[import-not-found, unused-ignore]  # who wants it installs it
    except ImportError as error:
        raise UsageError(
            f"--database: {text!r} needs a client for Redis; 'pip install redis', or name a folder"
        ) from error
    try:
        client = Redis.from_url(text)
        client.ping()
    except (ValueError, RedisError) as error:
        raise UsageError(f"--database: {text!r} does not answer: {error}; name one that does") from error
    return RedisExampleDatabase(client)


def _folder(text: str) -> ExampleDatabase:
    folder = Path(text)
    if "://" in text or (folder.exists() and not folder.is_dir()):
        raise UsageError(
            f"--database: expected a folder or redis://host:port/number, got {text!r}; Hypothesis has no "
            "other kind of database that machines share"
        )
    return DirectoryBasedExampleDatabase(folder)


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
