"""Compiles an emulated kernel program with g++, cached by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "src" / "dsa_topk" / "csrc"

_COMMON = (
    "-std=c++17",
    "-g1",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-unused-parameter",
    "-fno-strict-aliasing",  # as nvcc: device code looks at one buffer through several types
    "-ftrivial-auto-var-init=pattern",  # a variable that nobody set must not be zero by luck
    "-DDSA_EMULATE",
)
_PLAIN = ("-O1",)
_QUICK = ("-O0",)  # most of what a mutant costs is its compilation
_SANITIZED = ("-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FILTER, DECODE, BOTH = 1, 2, 3
"""Which kernels a small build has (runner.cpp)."""


class BuildError(RuntimeError):
    """g++ refused the program; the text has its first errors."""


def compiler() -> str | None:
    """Path of the C++ compiler, None when there is none (the emulated tests are skipped then)."""
    return shutil.which(os.environ.get("CXX", "g++"))


def cache_dir() -> Path:
    """Where built programs are kept: a directory of this user's alone."""
    path = Path(tempfile.gettempdir()) / f"dsa-topk-emulator-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise BuildError(f"{path} belongs to another user")
    return path


def _key(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def build(
    program: str,
    *,
    sanitize: bool = False,
    small: int = 0,
    include: Path = CSRC,
    here: Path = HERE,
    into: Path | None = None,
) -> Path:
    """Compile ``<here>/<program>.cpp`` and return the executable, the headers it was built from beside it.

    Parameters
    ----------
    program : str
        Stem of the source file, ``selftest`` or ``runner``.
    sanitize : bool
        With the address and undefined-behaviour sanitizers.
    small : int
        `FILTER`, `DECODE` or `BOTH`: two kernels of each kind and two element types only, for mutants (runner).
    include : Path
        Directory of the kernel headers; mutants give a changed copy.
    here : Path
        Directory of the emulator; mutants of the self-test give a changed copy.
    into : Path, optional
        A new directory for the result; default the cache, where nothing is built twice.

    Raises
    ------
    BuildError
        If there is no compiler or it fails.
    """
    gxx = compiler()
    if gxx is None:
        raise BuildError("no C++ compiler: g++ is not on PATH (CXX names another)")
    optimise = _SANITIZED if sanitize else _QUICK if small else _PLAIN
    flags = [*_COMMON, *optimise, *((f"-DEMULATED_SMALL={small}",) if small else ())]
    # Compiled from copies: whoever edits the sources meanwhile changes neither the program nor what its key stands for.
    staging = Path(tempfile.mkdtemp(prefix="staging-", dir=cache_dir() if into is None else into.parent))
    try:
        sources = [*sorted(here.glob("*.h")), here / f"{program}.cpp"]
        kernels = sorted(include.glob("*.*h")) if include.is_dir() else []
        for folder, files in (("emulator", sources), ("csrc", kernels)):
            (staging / folder).mkdir()
            for file in files:
                shutil.copy2(file, staging / folder / file.name)
        if into is None:
            version = subprocess.run([gxx, "--version"], capture_output=True, check=True).stdout
            copies = sorted(p for p in staging.rglob("*") if p.is_file())
            key = _key([version, *(f.encode() for f in flags), *(p.name.encode() + p.read_bytes() for p in copies)])
            into = cache_dir() / f"{program}-{key}"
            if (into / program).exists():
                os.utime(into)
                return into / program
            _forget_old()
        source = staging / "emulator" / f"{program}.cpp"
        command = [gxx, *flags, f"-I{staging / 'emulator'}", f"-I{staging / 'csrc'}", str(source)]
        done = subprocess.run([*command, "-o", str(staging / program)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line][:8]
            raise BuildError(f"{' '.join(command)}\n" + "\n".join(errors or done.stderr.splitlines()[:20]))
        try:
            staging.rename(into)  # atomic; another process may have been quicker
        except OSError:
            if not (into / program).exists():
                raise
        return into / program
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _forget_old(days: float = 2.0) -> None:
    """Drop builds that nobody has used for some days (a sanitized one has tens of megabytes)."""
    for old in cache_dir().iterdir():
        if time.time() - old.stat().st_mtime > days * 86400:
            shutil.rmtree(old, ignore_errors=True)
