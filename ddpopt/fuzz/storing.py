"""Write a file whole or not at all, so that a process that ends while it writes leaves the file as it was."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Put `text` in place of what a file has, in one step.

    Args:
        file: in a folder that exists.
        text: written as UTF-8.

    Raises:
        OSError: the folder cannot be written to.
    """
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
