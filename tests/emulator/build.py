"""Compiles an emulated kernel program with g++, cached by content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
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
_SANITIZED = ("-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


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


def build(program: str, *, sanitize: bool = False, include: Path = CSRC, here: Path = HERE, keep: bool = True) -> Path:
    """Compile ``<here>/<program>.cpp`` and return the executable.

    Parameters
    ----------
    program : str
        Stem of the source file, ``selftest`` or ``runner``.
    sanitize : bool
        With the address and undefined-behaviour sanitizers.
    include : Path
        Directory of the kernel headers; mutants give a changed copy.
    here : Path
        Directory of the emulator; mutants of the self-test give a changed copy.
    keep : bool
        False for mutants: built into a directory that the caller removes (``<include>/../<program>``).

    Raises
    ------
    BuildError
        If there is no compiler or it fails.
    """
    gxx = compiler()
    if gxx is None:
        raise BuildError("no C++ compiler: g++ is not on PATH (CXX names another)")
    flags = [*_COMMON, *(_SANITIZED if sanitize else _PLAIN)]
    if keep:
        sources = [*sorted(here.glob("*.h")), here / f"{program}.cpp", *(sorted(include.glob("*.*h")) if include.is_dir() else [])]
        version = subprocess.run([gxx, "--version"], capture_output=True, check=True).stdout
        key = _key([version, *(f.encode() for f in flags), *(p.name.encode() + p.read_bytes() for p in sources)])
        target = cache_dir() / f"{program}-{key}"
        if target.exists():
            return target
    else:
        target = here / program if here != HERE else include.parent / program
    # a name of its own while it is built: another process may do the same, and the rename is atomic
    staging = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    command = [gxx, *flags, f"-I{here}", f"-I{include}", str(here / f"{program}.cpp"), "-o", str(staging)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line][:8]
        raise BuildError(f"{' '.join(command)}\n" + "\n".join(errors or done.stderr.splitlines()[:20]))
    os.replace(staging, target)
    return target
