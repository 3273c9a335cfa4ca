"""The demo's text: read the shipped novel or the user's files, and cut pieces for the requests of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from dsa_topk.io import InputError

#: Jane Austen, Persuasion (1818): public domain. data/README.md says where the copy comes from.
DEFAULT_TEXT = "persuasion.txt"

MAX_FILES = 16


@dataclass(frozen=True)
class Text:
    """One text and the name to show for it."""

    name: str
    content: str


def load_texts(paths: Sequence[str | Path] = ()) -> list[Text]:
    """Read the named files, or the shipped novel when none is named.

    Raises
    ------
    InputError
        If a file is missing, empty, binary or not UTF-8, or if there are more than ``MAX_FILES``.
    """
    if not paths:
        source = files("dsa_topk.demo") / "data" / DEFAULT_TEXT
        return [Text("Jane Austen, Persuasion", source.read_text(encoding="utf-8"))]
    if len(paths) > MAX_FILES:
        raise InputError(f"--text: at most {MAX_FILES} files, got {len(paths)}")
    return [Text(Path(path).name, read_text(path)) for path in paths]


def read_text(path: str | Path) -> str:
    """Read one UTF-8 text file (a byte-order mark is allowed), or raise InputError with the reason in one line."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{path}: is UTF-16 text; expected UTF-8 (iconv -f utf-16 -t utf-8 converts it)")
    if b"\0" in data:
        raise InputError(f"{path}: is a binary file (it holds zero bytes); expected UTF-8 text")
    try:
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: is not UTF-8 text (byte {error.object[error.start]:#04x} at offset {error.start}); "
            "iconv converts other encodings"
        ) from error
    if not content.strip():
        raise InputError(f"{path}: is empty; expected some text")
    return content


def cut(content: str, pieces: int, piece: int, *, most: int) -> str:
    """Return piece ``piece`` of ``pieces`` equal parts of a text, from a word's start, at most ``most`` characters."""
    start, end = (len(content) * part // pieces for part in (piece, piece + 1))
    while 0 < start < end and not content[start - 1].isspace():
        start += 1
    return content[start : min(end, start + most)]
