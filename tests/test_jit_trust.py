"""Loading a module is running code: folders and files that others own or can write to are refused, with a warning."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import jit_fixture
from dsa_topk import jit
from dsa_topk.jit import core, store
from jit_fixture import Workshop, answer, mode, outcome

workshop = jit_fixture.workshop

ROOT = os.geteuid() == 0


def _edit(entry: Path, **changes: object) -> None:
    path = entry / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- foreign code


def plant(workshop: Workshop, folder: Path) -> Path:
    """A whole, well-formed entry for our key that answers 666."""
    key = workshop.build().key
    shutil.copytree(workshop.cache / key, folder / key)
    evil = workshop.home / "evil"
    evil.mkdir()
    (evil / "module.cu").write_text((workshop.sources / "module.cu").read_text())
    (evil / "answer.cuh").write_text("#define ANSWER 666\n")
    bad = jit.obtain(("90a",), finder=jit.Finder(evil, aot=workshop.home / "aot"))
    assert bad is not None
    shutil.copy(bad.path, folder / key / "module.so")
    manifest = json.loads((bad.path.parent / "manifest.json").read_text())
    _edit(folder / key, sha256=manifest["sha256"], size=manifest["size"])
    shutil.rmtree(workshop.cache)
    return folder / key


def test_the_planted_entry_would_be_taken_from_a_safe_folder(workshop: Workshop) -> None:
    """Shows that the next tests refuse it for the folder's sake and not because it is malformed."""
    folder = workshop.home / "planted"
    plant(workshop, folder)
    shutil.move(folder, workshop.cache)
    assert answer(workshop.build().path) == 666


@pytest.mark.parametrize("bits", [0o777, 0o775, 0o1777, 0o757])
def test_cache_folder_that_others_can_write_is_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    folder = workshop.home / "planted"
    plant(workshop, folder)
    folder.chmod(bits)
    monkeypatch.setenv("DSA_TOPK_CACHE_DIR", str(folder))
    with pytest.warns(RuntimeWarning, match="refused"):
        found = workshop.build()
    assert found.path.is_relative_to(core.fallback_dir())
    assert answer(found.path) == 42
    with pytest.raises(jit.JitError, match="refused"):
        jit.build("90a", folder, finder=workshop.finder())
    assert "writable" in (jit.status().cache_problem or "")


@pytest.mark.skipif(not ROOT, reason="only root can give folders away")
@pytest.mark.parametrize("what", ["folder", "parent", "entry", "module"])
def test_what_others_own_is_refused(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    folder = workshop.home / "above" / "planted"
    entry = plant(workshop, folder)
    owned = {"folder": folder, "parent": folder.parent, "entry": entry, "module": entry / "module.so"}[what]
    os.chown(owned, 12345, 12345)
    monkeypatch.setenv("DSA_TOPK_CACHE_DIR", str(folder))
    with pytest.warns(RuntimeWarning, match="12345"):
        assert answer(workshop.build().path) == 42


def test_parent_that_everyone_can_write_must_be_sticky(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = workshop.home / "open"
    plant(workshop, parent / "planted")
    monkeypatch.setenv("DSA_TOPK_CACHE_DIR", str(parent / "planted"))
    parent.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="not sticky"):
        assert answer(workshop.build().path) == 42
    parent.chmod(0o1777)
    assert store.folder_problem(parent / "planted") is None


def test_unsafe_fallback_is_not_used_either(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(workshop, core.fallback_dir())
    core.fallback_dir().chmod(0o777)
    bad = workshop.home / "open"
    bad.mkdir()
    bad.chmod(0o777)
    monkeypatch.setenv("DSA_TOPK_CACHE_DIR", str(bad))
    with pytest.warns(RuntimeWarning, match="refused"):
        found = workshop.build()
    assert (found.how, answer(found.path)) == ("built", 42)
    assert not found.path.is_relative_to(core.fallback_dir())


def test_folder_of_last_resort_goes_away_with_the_process(workshop: Workshop) -> None:
    for folder in (workshop.cache, core.fallback_dir()):
        folder.mkdir()
        folder.chmod(0o777)
    result = outcome(workshop.start())
    assert result["how"] == "built"
    assert Path(result["path"]).is_relative_to(workshop.temporary)
    assert not Path(result["path"]).exists()
    assert [p.name for p in workshop.temporary.iterdir()] == [core.fallback_dir().name]


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_any_umask_gives_a_safe_cache(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    monkeypatch.setenv("DSA_TOPK_CACHE_DIR", str(workshop.home / "a" / "b" / "c"))
    previous = os.umask(umask)
    try:
        found = workshop.build()
    finally:
        os.umask(previous)
    for path in (found.path, *list(found.path.parents)[:4]):
        assert mode(path) & 0o022 == 0, path
    assert workshop.build().how == "cached"
    assert found.path.is_relative_to(workshop.home / "a")
