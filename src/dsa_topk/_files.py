"""Files written whole or not at all: a reader, or a run cut short, finds the old content or the new one."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def staged(path: Path, publish: Callable[[Path, Path], object] | None = None) -> Iterator[Path]:
    """Give an empty private file beside ``path`` to write to; publish it when the block ends, remove it when it fails.

    Parameters
    ----------
    path : Path
        The file to make or to replace; its folder exists.
    publish : callable, optional
        ``publish(temporary, path)`` gives the finished file its name; default: ``os.replace``.

    Raises
    ------
    OSError
        When it cannot be made, written or published.
    """
    # The suffix stays (writers choose their format by it), the leading dot keeps it out of listings and content hashes.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp{path.suffix}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        mode = os.fstat(handle).st_mode & 0o777  # what the umask leaves
        os.close(handle)
        yield temporary
        temporary.chmod(mode)  # a writer may have put a file of its own, with other rights, in the place
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # the bytes are on the disk before the name points at them
        (publish or os.replace)(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Make or replace a text file, and its folders if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, content: Any) -> None:
    """Make or replace a JSON file, and its folders if need be."""
    write_text(path, json.dumps(content, indent=1) + "\n")
