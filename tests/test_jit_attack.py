"""The build cache under attack: always a correct module or a clear error, never foreign code, nothing half done."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jit_fixture
from dsa_topk import jit
from dsa_topk.jit import core, source, store
from dsa_topk.jit.store import Store
from jit_fixture import REAL, Workshop, answer, needs_nvcc, outcome

workshop = jit_fixture.workshop

ROOT = os.geteuid() == 0


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    """A tmpfs on ``folder``; skips where it cannot be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if not ROOT or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no right to mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# --- many processes


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=needs_nvcc)])
def test_eight_cold_processes_build_once(workshop: Workshop, real: bool) -> None:
    env = {}
    if real:
        assert REAL is not None
        env["CUDA_HOME"] = str(REAL.path.parent.parent)
    else:
        workshop.hook("sleep 0.3")
    results = [outcome(process) for process in [workshop.start(**env) for _ in range(8)]]
    assert len({result["path"] for result in results}) == 1
    assert [result["how"] for result in results].count("built") == 1
    assert answer(results[0]["path"]) == 42
    assert workshop.leftovers() == []
    if not real:
        assert workshop.runs() == 1


def test_processes_without_flock_publish_one_whole_entry(workshop: Workshop) -> None:
    """As on NFS, where flock may be missing or know one node only: everybody compiles, one is published."""
    workshop.hook("sleep 0.5")
    code = """
    def no_flock(*_):
        raise OSError(37, "No locks available")
    store.fcntl.flock = no_flock
    """
    results = [outcome(process) for process in [workshop.start(code) for _ in range(4)]]
    assert {result["path"] for result in results} == {str(workshop.build().path)}
    assert workshop.runs() > 1
    assert len(workshop.entries()) == 1
    assert workshop.leftovers() == []
    assert answer(results[0]["path"]) == 42


def test_a_hung_lock_holder_does_not_stop_others(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.build()
    key = workshop.entries()[0]
    shutil.rmtree(workshop.cache / key)
    flock = Store._flock
    with Store(workshop.cache).lock(key) as locked:
        assert locked
        monkeypatch.setattr(Store, "_flock", staticmethod(lambda handle, _: flock(handle, 0.2)))
        assert workshop.build().how == "built"


def test_damaged_entry_under_eight_processes(workshop: Workshop) -> None:
    path = workshop.build().path
    path.write_bytes(b"")
    workshop.hook("sleep 0.2")
    results = [outcome(process) for process in [workshop.start() for _ in range(8)]]
    assert {result["path"] for result in results} == {str(path)}
    assert workshop.runs() == 2
    assert answer(path) == 42


# --- killed


def assert_sound(workshop: Workshop) -> None:
    """Every entry is whole, whatever was killed when."""
    cache = Store(workshop.cache)
    for name in cache.names():
        assert cache.verify(name).key == name


def test_kill_9_at_random_moments(workshop: Workshop) -> None:
    """15 kills spread over start, compile and publish (a build takes about 0.4 s here); the seed is printed."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    moments = random.Random(seed)
    for _ in range(15):
        process = workshop.start()
        time.sleep(moments.uniform(0.05, 0.5))
        process.kill()
        process.communicate()
        if workshop.cache.is_dir():
            assert_sound(workshop)
            for name in workshop.entries():
                shutil.rmtree(workshop.cache / name)  # so that the next one has to build as well
    result = outcome(workshop.start())
    assert answer(result["path"]) == 42


KILL_POINTS = {
    "compiled": "core.elf_problem",
    "manifest written": "store._sync",
    "before publishing": "os.rename",
    "while creating the cache": "store.Store.create",
    "while locking": "store.Store.lock",
}


@pytest.mark.parametrize("point", KILL_POINTS)
def test_kill_9_at_named_points(workshop: Workshop, point: str) -> None:
    target = KILL_POINTS[point]
    process = workshop.start(f"{target} = lambda *_, **__: os.kill(os.getpid(), 9)")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not workshop.cache.exists() or workshop.entries() == []
    result = outcome(workshop.start())
    assert (result["how"], answer(result["path"])) == ("built", 42)
    if point in ("compiled", "manifest written", "before publishing"):
        (left,) = workshop.leftovers()  # private, and young: perhaps somebody works there
        assert left.startswith(store.STAGING)
        assert Store(workshop.cache).clean(staging_s=0) == [left]
        assert workshop.leftovers() == []


def test_kill_9_right_after_publishing_keeps_the_entry(workshop: Workshop) -> None:
    code = """
    rename = os.rename
    def kill(*names):
        rename(*names)
        os.kill(os.getpid(), 9)
    os.rename = kill
    """
    process = workshop.start(code)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert_sound(workshop)
    result = outcome(workshop.start())
    assert (result["how"], answer(result["path"]), workshop.runs()) == ("cached", 42, 1)


def test_later_builds_clean_up_by_age(workshop: Workshop) -> None:
    workshop.cache.mkdir()
    for name, age in (
        (".staging-old", 7200),
        (".staging-young", 60),
        (".corrupt-old", 8 * 86400),
        (".corrupt-young", 60),
    ):
        (workshop.cache / name / "deep").mkdir(parents=True)
        then = time.time() - age
        os.utime(workshop.cache / name, (then, then))
    workshop.build()
    left = sorted(p.name for p in workshop.cache.iterdir() if p.name.startswith("."))
    assert left == [".corrupt-young", ".staging-young"]


def test_an_interrupt_takes_the_compiler_along(workshop: Workshop) -> None:
    workshop.hook('sleep 30 & echo $! > "$home/pid"; wait')
    process = workshop.start()
    pid_file = workshop.toolkit / "pid"
    end = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text().strip()) and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    pid = int(pid_file.read_text())
    end = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _runs(pid)
    assert workshop.leftovers() == []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


# --- damaged entries


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated module": lambda e: (e / "module.so").write_bytes((e / "module.so").read_bytes()[:-100]),
    "empty module": lambda e: (e / "module.so").write_bytes(b""),
    "one bit of the module": lambda e: _flip(e / "module.so"),
    "no module": lambda e: (e / "module.so").unlink(),
    "module is a folder": lambda e: _replace(e / "module.so", Path.mkdir),
    "no manifest": lambda e: (e / "manifest.json").unlink(),
    "empty manifest": lambda e: (e / "manifest.json").write_bytes(b""),
    "manifest is a list": lambda e: (e / "manifest.json").write_text("[]"),
    "manifest is not text": lambda e: (e / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "truncated manifest": lambda e: (e / "manifest.json").write_bytes((e / "manifest.json").read_bytes()[:50]),
    "extra key in the manifest": lambda e: _edit(e, extra=1),
    "another entry's manifest": lambda e: _edit(e, key="0-0-80"),
    "empty folder": lambda e: _replace(e, Path.mkdir),
    "module writable by others": lambda e: (e / "module.so").chmod(0o666),
    "manifest writable by the group": lambda e: (e / "manifest.json").chmod(0o664),
    "folder writable by others": lambda e: e.chmod(0o777),
    "module is a link": lambda e: _replace(e / "module.so", lambda path: path.symlink_to(_kept(path))),
}


def _kept(path: Path) -> Path:
    return path.with_name(f".{path.name}.kept")


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.rename(_kept(path))
    make(path)


def _edit(entry: Path, **changes: object) -> None:
    path = entry / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_moved_aside_and_built_again(workshop: Workshop, damage: str) -> None:
    path = workshop.build().path
    DAMAGE[damage](path.parent)
    assert jit.find("90a", finder=workshop.finder()) is None
    with pytest.warns(RuntimeWarning, match="moved aside"):
        again = workshop.build()
    assert (again.how, again.path, answer(again.path)) == ("built", path, 42)
    assert_sound(workshop)
    assert [p.name for p in workshop.cache.iterdir() if p.name.startswith(store.CORRUPT)] != []
    assert workshop.build().how == "cached"


def test_an_entry_that_is_a_file_is_moved_aside(workshop: Workshop) -> None:
    path = workshop.build().path
    shutil.rmtree(path.parent)
    path.parent.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="moved aside"):
        assert answer(workshop.build().path) == 42


def test_damaged_entry_without_compiling_is_an_error(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workshop.build().path
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setenv("DSA_TOPK_DISABLE_JIT", "1")
    with pytest.raises(jit.MissingBuildError, match="bytes, the manifest says"):
        workshop.build()


def test_damaged_list_of_compilers_is_ignored(workshop: Workshop) -> None:
    workshop.cache.mkdir()
    for content in ("", "[1]", '{"x": 3}', '{"/bin/nvcc": [1, 2, 3]}', "\x00"):
        (workshop.cache / "compilers.json").write_text(content)
        assert answer(workshop.build().path) == 42


# --- full disk

FULL_POINTS = {
    "creating the cache": (Store, "create"),
    "staging": (store.tempfile, "mkdtemp"),
    "writing the sources": (source.Snapshot, "write_to"),
    "syncing": (store, "_sync"),
    "publishing": (store.os, "rename"),
}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("point", FULL_POINTS)
def test_full_disk_is_a_clear_error(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, point: str, number: int
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(*FULL_POINTS[point], full)
        with pytest.raises(jit.JitError, match="free some space"):
            workshop.build()
    assert workshop.leftovers() == []
    assert not workshop.cache.exists() or workshop.entries() == []
    assert answer(workshop.build().path) == 42


def test_a_really_full_disk(workshop: Workshop) -> None:
    """From a disk on which nothing fits to one on which all does (the module has 15 KiB, a page 4): error or build."""
    built = []
    for kib in range(4, 60, 8):
        with small_disk(workshop.cache, f"size={kib}k,mode=755"):
            error = None
            try:
                found = workshop.build()
            except jit.JitError as caught:
                error = str(caught)
            built.append(error is None)
            if error is None:
                assert answer(found.path) == 42
            else:
                assert "full" in error or "space" in error, error
                assert workshop.entries() == []
            assert workshop.leftovers() == []
    assert built == sorted(built)
    assert set(built) == {False, True}


def test_a_limit_on_file_sizes(workshop: Workshop) -> None:
    """RLIMIT_FSIZE stands for any write that fails half way, the compiler's own included."""
    process = workshop.start("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))")
    assert "error" in outcome(process)
    assert workshop.leftovers() == []
    assert workshop.entries() == []


# --- read-only


def test_read_only_cache_hit_and_miss(workshop: Workshop) -> None:
    with small_disk(workshop.cache, "size=4m,mode=755"):
        hit = workshop.build()
        subprocess.run(["mount", "-o", "remount,ro", str(workshop.cache)], check=True)
        assert workshop.build().path == hit.path
        workshop.set_answer(43)
        with pytest.warns(RuntimeWarning, match="cannot write to the cache folder"):
            miss = workshop.build()
        assert miss.path.is_relative_to(core.fallback_dir())
        assert answer(miss.path) == 43
        assert workshop.build().how == "cached"  # the next process finds it there


def test_read_only_cache_miss_anywhere(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without the right to mount: the first staging folder is refused."""
    first = workshop.build()
    workshop.set_answer(43)
    made = store.tempfile.mkdtemp

    def refuse(*_: object, dir: Path | None = None, **options: str) -> str:
        if dir == workshop.cache:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return made(dir=dir, **options)

    monkeypatch.setattr(store.tempfile, "mkdtemp", refuse)
    with pytest.warns(RuntimeWarning, match="cannot write to the cache folder"):
        second = workshop.build()
    assert second.path.is_relative_to(core.fallback_dir())
    assert (answer(first.path), answer(second.path)) == (42, 43)
    with pytest.raises(jit.JitError, match="cannot store the build"):
        jit.build("100", workshop.cache, finder=workshop.finder())


def test_damaged_entry_in_a_read_only_cache(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    path = workshop.build().path
    path.write_bytes(b"")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    rename = os.rename
    monkeypatch.setattr(store.os, "rename", lambda a, b: refuse() if Path(b).parent == workshop.cache else rename(a, b))
    with pytest.warns(RuntimeWarning, match="cannot write to the cache folder"):
        found = workshop.build()
    assert found.path.is_relative_to(core.fallback_dir())
    assert answer(found.path) == 42


def test_cache_path_that_is_a_file(workshop: Workshop) -> None:
    workshop.cache.write_text("")
    with pytest.warns(RuntimeWarning, match="not a folder"):
        assert answer(workshop.build().path) == 42
