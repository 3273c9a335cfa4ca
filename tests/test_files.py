"""Files are written whole or not at all (src/dsa_topk/_files.py), and every result writer goes through it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_topk import _files
from dsa_topk.bench import record
from dsa_topk.conformance import report


def write_half(path: Path, error: BaseException) -> None:
    with _files.staged(path) as temporary:
        temporary.write_text("ha")
        raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("bug"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", ["old", None])
def test_a_writer_that_fails_half_way_changes_nothing(tmp_path: Path, before: str | None, error: BaseException) -> None:
    path = tmp_path / "a.json"
    if before is not None:
        path.write_text(before)
    with pytest.raises(type(error)):
        write_half(path, error)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == ({"a.json": before} if before else {})


WRITERS: dict[str, Callable[[Path], None]] = {
    "write_text": lambda path: _files.write_text(path, "new"),
    "write_json": lambda path: _files.write_json(path, {"new": 1}),
    "bench": lambda path: record.Record({}).save(path),
    "conformance": lambda path: report.write_json(path, {"new": 1}),
}


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_fails_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, step: str
) -> None:
    path = tmp_path / "deep" / "a.json"
    WRITERS[name](path)
    before = path.read_bytes()
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(OSError, match="No space"):
            WRITERS[name](path)
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["a.json"]
    WRITERS[name](path)
    assert path.read_bytes() == before


def test_content_that_is_no_json_is_found_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        _files.write_json(path, {"a": object()})
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_the_file_has_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        _files.write_text(tmp_path / "a", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
