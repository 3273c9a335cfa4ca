"""The disk cache: safe folders, verified entries, per-key lock, private staging, publishing in one step.

An entry is a folder ``<key>/`` with ``module.so`` and ``manifest.json`` (size and sha256 of the module). It appears by
one rename of a finished private folder, so readers need no lock and the lock only saves double work; that also holds
where flock is missing or covers a single node (NFS).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MODULE = "module.so"
MANIFEST = "manifest.json"
STAGING = ".staging-"
CORRUPT = ".corrupt-"
PARTIAL = ".partial-"  # small files on their way to being renamed
STALE_STAGING_S = 3600.0  # no build takes that long, so nobody works there any more
STALE_CORRUPT_S = 7 * 86400.0  # kept for a while: somebody may want to know what broke
LOCK_PATIENCE_S = 300.0

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says about the module beside it."""

    key: str
    sources: str
    archs: tuple[str, ...]
    compiler: str
    flags: tuple[str, ...]
    tvm_ffi: str
    sha256: str
    size: int
    seconds: float


def _overflow_uid() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def _foreign(info: os.stat_result, what: Path) -> str | None:
    if info.st_uid not in (0, os.geteuid()):
        return f"{what} is owned by uid {info.st_uid}, not by uid {os.geteuid()} or root"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{what} is writable by group or others (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


def folder_problem(folder: Path) -> str | None:
    """Why code in ``folder`` cannot be trusted: someone else owns it or can write to it or swap it; else None.

    A folder that does not exist is judged by its nearest existing parent.
    """
    real = Path(os.path.realpath(folder))
    try:
        if real.exists():
            if not real.is_dir():
                return f"{real} is not a folder"
            if problem := _foreign(real.stat(), real):
                return problem
        for parent in real.parents:
            if not parent.exists():
                continue
            info = parent.stat()
            # Sticky folders such as /tmp are fine: others cannot rename what is ours in there.
            if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
                return f"{parent} (above {real}) is writable by everyone and not sticky"
            # In a user namespace unmapped owners, root's included, show as the overflow uid.
            if info.st_uid not in (0, os.geteuid(), _overflow_uid()):
                return f"{parent} (above {real}) is owned by uid {info.st_uid}"
    except OSError as error:
        return f"{real} cannot be examined: {error}"
    return None


def elf_problem(data: bytes) -> str | None:
    """Why bytes are not a whole ELF file: catches a linker that ran out of disk without saying so."""
    if len(data) < 64 or data[:5] != b"\x7fELF\x02":
        return "not a 64-bit ELF file"
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    return None if offset + size * count <= len(data) else "a truncated ELF file"


class Store:
    """One cache folder.

    Parameters
    ----------
    root : Path
        The folder; created on the first build.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root.expanduser()))

    def problem(self) -> str | None:
        """Why the folder is refused, None if it is safe (or not there yet)."""
        return folder_problem(self.root)

    def names(self) -> list[str]:
        """Names of the entries, verified or not, newest first."""
        try:
            found = [(item.stat().st_mtime, item.name) for item in os.scandir(self.root) if self._is_entry(item)]
        except OSError:
            return []
        return [name for _, name in sorted(found, reverse=True)]

    @staticmethod
    def _is_entry(item: os.DirEntry[str]) -> bool:
        return not item.name.startswith(".") and item.is_dir(follow_symlinks=False)

    def module(self, name: str) -> Path:
        """Path of an entry's module."""
        return self.root / name / MODULE

    def present(self, name: str) -> bool:
        """Whether an entry looks complete; cheap, verifies nothing."""
        try:
            return self.module(name).stat().st_size > 0 and (self.root / name / MANIFEST).stat().st_size > 0
        except OSError:
            return False

    def read(self, name: str) -> Manifest:
        """The manifest of an entry.

        Raises
        ------
        ValueError
            If it is unreadable or malformed; the text says how.
        """
        try:
            data = json.loads((self.root / name / MANIFEST).read_bytes())
            manifest = Manifest(**{**data, "archs": tuple(data["archs"]), "flags": tuple(data["flags"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"manifest of {name} is unreadable: {error}") from error
        if manifest.key != name:
            raise ValueError(f"manifest of {name} belongs to {manifest.key}")
        return manifest

    def verify(self, name: str) -> Manifest:
        """The manifest of an entry whose module is whole and safe to load.

        Raises
        ------
        ValueError
            If anything is missing, damaged or writable by others; the text says what.
        """
        manifest = self.read(name)
        path = self.module(name)
        try:
            for checked in (path.parent, path, self.root / name / MANIFEST):
                info = checked.lstat()
                if stat.S_ISLNK(info.st_mode):
                    raise ValueError(f"{checked} is a symbolic link")
                if problem := _foreign(info, checked):
                    raise ValueError(problem)
            data = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if len(data) != manifest.size:
            raise ValueError(f"{path} has {len(data)} bytes, the manifest says {manifest.size}")
        if hashlib.sha256(data).hexdigest() != manifest.sha256:
            raise ValueError(f"{path} does not have the sha256 of its manifest")
        return manifest

    def create(self) -> None:
        """Make the folder and the missing ones above it, closed to other writers whatever the umask says."""
        missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o755, exist_ok=True)  # exist_ok: a racing process makes the same ones

    @contextlib.contextmanager
    def lock(self, name: str, patience_s: float = LOCK_PATIENCE_S) -> Iterator[bool]:
        """Hold the entry's lock; yields False where there is none to be had (no flock, hung holder, full disk)."""
        try:
            handle = os.open(self.root / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            yield False
            return
        try:
            yield self._flock(handle, patience_s)
        finally:
            # Explicitly: a process forked meanwhile shares the descriptor and would keep the lock alive.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    @staticmethod
    def _flock(handle: int, patience_s: float) -> bool:
        end = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= end:
                    return False
                time.sleep(0.05)
            except OSError:
                return False

    @contextlib.contextmanager
    def staging(self, name: str) -> Iterator[Path]:
        """A private folder on the cache's file system, gone afterwards unless it was published."""
        path = Path(tempfile.mkdtemp(prefix=f"{STAGING}{name}-{os.getpid()}-", dir=self.root))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def publish(self, folder: Path, manifest: Manifest) -> None:
        """Turn a staging folder that holds ``module.so`` into the entry ``manifest.key``.

        A valid entry that another process published first is kept, a damaged one is moved aside.
        """
        (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")
        for name, mode in ((MODULE, 0o755), (MANIFEST, 0o644)):
            (folder / name).chmod(mode)
            _sync(folder / name)
        folder.chmod(0o755)
        _sync(folder)
        final = self.root / manifest.key
        for attempt in range(3):
            try:
                os.rename(folder, final)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENOENT):
                    raise
                # ENOENT: over NFS a rename that was sent twice reports the second, failed try.
                try:
                    self.verify(manifest.key)
                    return
                except ValueError:
                    if attempt == 2 or not folder.exists():
                        raise error from None
                    self.move_aside(manifest.key)
        _sync(self.root)

    def move_aside(self, name: str) -> None:
        """Take an entry out of the way in one step, so that nobody sees it half gone."""
        aside = self.root / f"{CORRUPT}{name}-{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.root / name, aside)
            os.utime(aside)  # its age counts from now

    def clean(self, staging_s: float = STALE_STAGING_S, corrupt_s: float = STALE_CORRUPT_S) -> list[str]:
        """Remove what killed builds and damaged entries left, if it is older than the given ages in seconds."""
        removed = []
        limits = {STAGING: staging_s, CORRUPT: corrupt_s, PARTIAL: staging_s}
        try:
            items = list(os.scandir(self.root))
        except OSError:
            return []
        for item in items:
            limit = next((age for prefix, age in limits.items() if item.name.startswith(prefix)), None)
            with contextlib.suppress(OSError):
                if limit is None or time.time() - item.stat(follow_symlinks=False).st_mtime < limit:
                    continue
                if item.is_dir(follow_symlinks=False):
                    shutil.rmtree(item.path, ignore_errors=True)
                else:
                    os.unlink(item.path)
                removed.append(item.name)
        return removed


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
