"""Builds and loads the CUDA module: nvcc, a content-keyed disk cache, the TVM-FFI C ABI.

>>> from dsa_topk import jit
>>> jit.build(["90a"])          # fill the cache; needs nvcc, no GPU
>>> module = jit.load()         # for the current device: package folder, then cache, then compiler

Environment: ``DSA_TOPK_CACHE_DIR`` (default ``~/.cache/dsa-topk``), ``DSA_TOPK_CUDA_ARCHS`` (``90a`` or
``80,90a,100,120``), ``DSA_TOPK_DISABLE_JIT=1`` (a missing build is an error). Importing this needs no compiler, no GPU
and no tvm_ffi.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import archs as arch_names
from . import source, toolchain
from .archs import TARGETS
from .core import Build, Finder, cache_dir, configured_archs, disabled, fallback_dir, obtain, usable_stores, warn_once
from .errors import JitError, MissingBuildError
from .store import Store

__all__ = [
    "TARGETS",
    "Build",
    "CachedBuild",
    "Finder",
    "JitError",
    "MissingBuildError",
    "Status",
    "build",
    "find",
    "load",
    "obtain",
    "status",
    "unavailable_reason",
]

_modules: dict[tuple[str | None, str], Any] = {}  # by (content key or None, target or capability), and by path
_reasons: dict[tuple[str | None, ...], str | None] = {}
_lock = threading.RLock()


def _after_fork() -> None:
    # A fork while another thread builds would leave the child with a lock that nobody opens.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def load(arch: str | None = None, *, device_index: int | None = None, finder: Finder | None = None) -> Any:
    """Load the compiled module, building it first if need be. Thread-safe; one module per process and target.

    Parameters
    ----------
    arch : str, optional
        Target such as ``"90a"``. Default: what the CUDA device needs; without a device, ``DSA_TOPK_CUDA_ARCHS``.
    device_index : int, optional
        The device when ``arch`` is None; default: the current one.
    finder : Finder, optional
        Other sources than the package's own.

    Returns
    -------
    tvm_ffi.Module
        Its attributes are the exported functions.

    Raises
    ------
    JitError
        If there is no build and none can be made (no nvcc, compiler error, full disk), or it cannot be loaded.
    MissingBuildError
        If there is no build and ``DSA_TOPK_DISABLE_JIT`` is set.
    """
    capability = None if arch is not None else _capability(device_index)
    slot = (finder.content if finder else None, arch or str(capability))
    if (module := _modules.get(slot)) is not None:
        return module
    with _lock:
        if (module := _modules.get(slot)) is None:
            to_build, wanted = _targets(arch, capability)
            module = _modules[slot] = _open(to_build, wanted, capability, finder)
        return module


def _capability(device_index: int | None) -> tuple[int, int] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device_index)
    return major, minor


def _targets(arch: str | None, capability: tuple[int, int] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What to compile on a miss, and which targets are good enough, best first."""
    if arch is not None:
        names = arch_names.parse(arch)
        if len(names) != 1:
            raise ValueError(f"arch: expected one architecture, got {arch!r}")
        return names, names
    configured = configured_archs()
    if capability is None:
        if configured is None:
            raise JitError(
                "no CUDA device to take the target from", hint="set DSA_TOPK_CUDA_ARCHS, for instance to 90a"
            )
        return configured, configured
    if configured is not None:
        usable = [name for name in configured if arch_names.runs_on(name, capability)]
        if usable:  # the closest last in the sorted list: 103a after 100
            return configured, tuple(reversed(usable))
        warn_once(
            f"DSA_TOPK_CUDA_ARCHS={','.join(configured)} does not serve this device (compute capability "
            f"{capability[0]}.{capability[1]}); using {arch_names.native(capability)}"
        )
    try:
        return (arch_names.native(capability),), arch_names.acceptable(capability)
    except ValueError as error:
        raise JitError(str(error), hint='use backend="torch"') from None


def _open(
    to_build: tuple[str, ...], wanted: tuple[str, ...], capability: tuple[int, int] | None, finder: Finder | None
) -> Any:
    found = obtain(to_build, wanted, finder=finder)
    if found is not None and not found.path.exists():  # moved aside by another process since it was verified
        found = obtain(to_build, wanted, finder=finder)
    assert found is not None  # compile_missing=True never returns None
    path = (None, str(found.path))
    if (module := _modules.get(path)) is not None:
        return module
    if capability is not None:
        _check_driver(found)
    import tvm_ffi

    try:
        module = tvm_ffi.load_module(path[1])
    except (RuntimeError, OSError, ValueError) as error:
        raise JitError(
            f"the build {found.path} cannot be loaded: {error}",
            hint="made on another system, or on a file system mounted noexec? Point DSA_TOPK_CACHE_DIR elsewhere",
        ) from error
    _modules[path] = module
    return module


def _check_driver(found: Build) -> None:
    """CUDA of a newer major release than the driver's fails at the first launch with a text nobody understands."""
    driver = toolchain.driver_release()
    try:
        made = toolchain.release(Store(found.path.parent.parent).read(found.key).compiler)
    except ValueError:
        return
    if driver and made and made[0] > driver[0]:
        raise JitError(
            f"the module was compiled with CUDA {made[0]}.{made[1]}, the driver supports CUDA {driver[0]}.{driver[1]}",
            hint=f"update the driver, or set CUDA_HOME to a CUDA {driver[0]} toolkit",
        )


def build(archs: Sequence[str] | str, cache_dir: Path | str | None = None, *, finder: Finder | None = None) -> Path:
    """Make sure that a build for all of ``archs`` is cached; needs no GPU.

    Parameters
    ----------
    archs : sequence of str
        Targets, e.g. ``["90a", "100"]``; they go into one module.
    cache_dir : path, optional
        Folder to use instead of the configured one; nothing else is tried then.
    finder : Finder, optional
        Other sources than the package's own.

    Returns
    -------
    Path
        The shared module.

    Raises
    ------
    ValueError
        For names that are no architectures.
    JitError, MissingBuildError
        As for :func:`load`.
    """
    found = obtain(arch_names.parse(archs), cache=None if cache_dir is None else Path(cache_dir), finder=finder)
    _reasons.clear()  # what was unavailable may be there now
    assert found is not None  # compile_missing=True never returns None
    return found.path


def find(archs: Sequence[str] | str, *, finder: Finder | None = None) -> Path | None:
    """Path of a whole cached build that holds all of ``archs``; None if there is none. Never compiles."""
    found = obtain(arch_names.parse(archs), compile_missing=False, finder=finder)
    return found.path if found else None


def unavailable_reason(arch: str | None = None) -> str | None:
    """Why :func:`load` cannot work on this machine; None if a build is there or can be made.

    Cheap (runs no compiler) and remembered for the current environment variables, so that ``backend="auto"`` may ask
    for every call.

    Parameters
    ----------
    arch : str, optional
        The target that matters; default: any.
    """
    if arch is None and _modules:
        return None
    names = ("CUDA_HOME", "CUDA_PATH", "PATH", "DSA_TOPK_CACHE_DIR", "DSA_TOPK_CUDA_ARCHS", "DSA_TOPK_DISABLE_JIT")
    question = (arch, *(os.environ.get(name) for name in names))
    if question not in _reasons:
        _reasons[question] = _reason(arch)
    return _reasons[question]


def _reason(arch: str | None) -> str | None:
    if source.tvm_ffi_version() is None:
        return "apache-tvm-ffi is not installed"
    try:
        finder = Finder()
    except OSError as error:
        return str(error)
    wanted = arch_names.parse(arch) if arch else None
    for store in (finder.aot, *usable_stores(warn=False)):
        for name in store.names():
            parts = source.split_name(name)
            fits = parts is not None and (wanted is None or set(wanted) <= set(parts[2]))
            if parts is None or not fits or not store.present(name):
                continue
            if parts[0] == finder.content or (store is finder.aot and _same_sources(store, name, finder)):
                return None
    if disabled():
        return "no cached build, and DSA_TOPK_DISABLE_JIT forbids compiling (fill the cache with `dsa-topk build`)"
    if toolchain.search().nvcc is None:
        return "no cached build and no nvcc (CUDA_HOME, pip wheels, PATH): " + toolchain.NO_NVCC_HINT
    return toolchain.host_compiler_problem()


def _same_sources(store: Store, name: str, finder: Finder) -> bool:
    try:
        return store.read(name).sources == finder.sources.digest
    except ValueError:
        return False


@dataclass(frozen=True)
class CachedBuild:
    """One entry of a cache folder; ``current``: made of the installed sources and versions."""

    key: str
    folder: Path
    archs: tuple[str, ...]
    compiler: str
    size: int
    current: bool


@dataclass(frozen=True)
class Status:
    """What ``dsa-topk info`` shows about building.

    ``nvcc_problem`` and ``cache_problem`` say why something found is not used; ``tried`` lists where nvcc was looked
    for; ``reason`` is :func:`unavailable_reason`.
    """

    nvcc: Path | None
    nvcc_how: str | None
    nvcc_version: str | None
    nvcc_problem: str | None
    tried: tuple[tuple[str, str], ...]
    cache_dir: Path
    cache_problem: str | None
    fallback_dir: Path
    content_key: str | None
    builds: tuple[CachedBuild, ...]
    archs: tuple[str, ...] | None
    disabled: bool
    tvm_ffi: str | None
    driver: tuple[int, int] | None
    reason: str | None


def status() -> Status:
    """Facts about compiler, cache and environment; runs ``nvcc --version`` at most."""
    problem: str | None = None
    archs = finder = version = None
    try:
        archs = configured_archs()
    except ValueError as error:
        problem = str(error)
    try:
        finder = Finder()
    except OSError as error:
        problem = str(error)
    found = toolchain.search()
    nvcc_problem = None
    if found.nvcc is not None:
        try:
            version = toolchain.version(found.nvcc.path)
            nvcc_problem = toolchain.host_compiler_problem()
        except (JitError, OSError) as error:
            nvcc_problem = str(error)
    folders = [Store(cache_dir()), Store(fallback_dir()), *([finder.aot] if finder else [])]
    builds = []
    for store in folders:
        for name in store.names():
            try:
                manifest = store.read(name)
            except ValueError:
                continue
            current = finder is not None and manifest.sources == finder.sources.digest
            if finder is not None and store is not finder.aot:
                current = name.startswith(finder.content + "-")
            builds.append(CachedBuild(name, store.root, manifest.archs, manifest.compiler, manifest.size, current))
    return Status(
        nvcc=found.nvcc.path if found.nvcc else None,
        nvcc_how=found.nvcc.how if found.nvcc else None,
        nvcc_version=version,
        nvcc_problem=nvcc_problem,
        tried=found.tried,
        cache_dir=cache_dir(),
        cache_problem=Store(cache_dir()).problem(),
        fallback_dir=fallback_dir(),
        content_key=finder.content if finder else None,
        builds=tuple(builds),
        archs=archs,
        disabled=disabled(),
        tvm_ffi=source.tvm_ffi_version(),
        driver=toolchain.driver_release(),
        reason=problem or unavailable_reason(),
    )
