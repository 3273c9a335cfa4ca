"""What is compiled: a snapshot of the source folder, the flags, and the content key made of them.

The key holds content only (names relative to the folder, bytes, flags, versions), never a place on disk: the same
package in another folder, image or user account finds the same build.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# Raise when the layout of a cache entry or the way the module is called changes without a change of the sources.
BUILDER_ABI = 1

CSRC = Path(__file__).resolve().parent.parent / "csrc"
UNIT = "module.cu"
SUFFIXES = (".cu", ".cuh", ".h", ".hpp", ".inl")

# Everything that changes the machine code. No -use_fast_math: denormals and -0.0 must survive.
DEVICE_FLAGS = ("-std=c++17", "-O3", "-lineinfo")
# Static cudart: the module then depends on nothing of CUDA but the driver. Nothing may be exported by accident.
LINK_FLAGS = ("-shared", "-cudart=static", "-Xcompiler=-fPIC,-fvisibility=hidden")


@dataclass(frozen=True)
class Snapshot:
    """The bytes that are hashed *and* compiled, so that an edit during a build cannot poison the cache."""

    folder: Path
    unit: str
    files: tuple[tuple[str, bytes], ...]
    digest: str

    @property
    def units(self) -> tuple[str, ...]:
        """Everything that is compiled, the main unit first: nvcc takes them in parallel."""
        others = (name for name, _ in self.files if name.endswith(".cu") and name != self.unit)
        return self.unit, *others

    def write_to(self, target: Path) -> None:
        """Write the files below ``target`` (a folder that only we use)."""
        for name, data in self.files:
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def snapshot(folder: Path = CSRC, unit: str = UNIT) -> Snapshot:
    """Read every source below ``folder``; ``unit`` is the one that Python calls, compiled with every other .cu.

    Raises
    ------
    FileNotFoundError
        If the unit is not there.
    """
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()
    )
    if unit not in names:
        raise FileNotFoundError(f"no {unit} in {folder}: the package's CUDA sources are missing")
    files = tuple((name, (folder / name).read_bytes()) for name in names)
    digest = hashlib.sha256()
    for name, data in (("unit", unit.encode()), *files):
        # Lengths in front: moving bytes from one file's end to the next one's start must change the digest.
        digest.update(f"{len(name)}:{name}:{len(data)}:".encode() + data)
    return Snapshot(folder, unit, files, digest.hexdigest())


def tvm_ffi_version() -> str | None:
    """Version of apache-tvm-ffi from its metadata (importing it would import torch), None if it is not installed."""
    try:
        return metadata.version("apache-tvm-ffi")
    except metadata.PackageNotFoundError:
        return None


def gencode(archs: tuple[str, ...]) -> list[str]:
    """Explicit targets; ``-arch=`` would run one more front-end pass."""
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]


def ambient_flags() -> list[str]:
    """Flags that nvcc takes from the environment, less the host compiler's place (a path is not content)."""
    kept: list[str] = []
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        words = iter(shlex.split(os.environ.get(name, "")))
        for word in words:
            if word in ("-ccbin", "--compiler-bindir"):
                next(words, None)
            elif not word.startswith(("-ccbin=", "--compiler-bindir=")):
                kept.append(f"{name}:{word}")
    return kept


def content_key(sources: Snapshot) -> str:
    """Key of everything but compiler and targets: a machine without nvcc can still ask for it."""
    parts = (BUILDER_ABI, sources.digest, DEVICE_FLAGS, LINK_FLAGS, ambient_flags(), tvm_ffi_version())
    return hashlib.sha256(repr((*parts, platform.machine())).encode()).hexdigest()[:20]


def compiler_key(version: str) -> str:
    """Short key of a compiler's version text."""
    return hashlib.sha256(version.encode()).hexdigest()[:8]


def entry_name(content: str, compiler: str, archs: tuple[str, ...]) -> str:
    """Name of a cache entry: content, compiler and targets, for instance ``1f..-9a8b7c6d-90a.100``."""
    return f"{content}-{compiler}-{'.'.join(archs)}"


def split_name(name: str) -> tuple[str, str, tuple[str, ...]] | None:
    """The three parts of an entry's name, None if it is not one."""
    parts = name.split("-")
    if len(parts) != 3 or not all(parts):
        return None
    return parts[0], parts[1], tuple(parts[2].split("."))
