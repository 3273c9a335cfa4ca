"""The content hash of the installed package: what ties recorded results to the code that produced them."""

from __future__ import annotations

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
# Made by builds and runs, not by authors.
_IGNORED_FOLDERS = frozenset({"__pycache__", "_aot", ".cache"})
_IGNORED_SUFFIXES = (".pyc", ".pyo", ".so", ".o", ".tmp", ".swp", ".orig", "~")


def content_files(folder: Path = PACKAGE) -> list[Path]:
    """The files that the hash covers, sorted by their path within ``folder``: sources and data, no build products."""
    found = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") or part in _IGNORED_FOLDERS for part in parts)
        if path.is_file() and not hidden and not path.name.endswith(_IGNORED_SUFFIXES):
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def content_hash(folder: Path = PACKAGE) -> str:
    """SHA-256 (hex) over the relative paths and bytes of :func:`content_files`; the same on every machine."""
    digest = hashlib.sha256()
    for path in content_files(folder):
        data = path.read_bytes()
        # Lengths in front, so that no two trees give the same stream of bytes.
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()
