"""Finding or making the build for a set of targets: package folder, then disk cache, then compiler."""

from __future__ import annotations

import atexit
import errno
import hashlib
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import archs as arch_names
from . import compiler, source, toolchain
from .errors import JitError, MissingBuildError
from .store import FULL, MODULE, READ_ONLY, Manifest, Store, elf_problem

log = logging.getLogger("dsa_topk.jit")

# Builds that came inside the package: `dsa-topk build --cache-dir src/dsa_topk/_aot` before the wheel is made.
AOT = Path(__file__).resolve().parent.parent / "_aot"

_warned: set[str] = set()


@dataclass(frozen=True)
class Build:
    """A build that can be loaded.

    Attributes
    ----------
    path : Path
        The shared module.
    key : str
        Its cache key.
    archs : tuple of str
        The targets inside.
    how : str
        ``"package"``, ``"cached"``, ``"waited"`` (another process built it meanwhile) or ``"built"``.
    seconds : float
        What this call spent on it.
    """

    path: Path
    key: str
    archs: tuple[str, ...]
    how: Literal["package", "cached", "waited", "built"]
    seconds: float


def disabled() -> bool:
    """Whether ``DSA_TOPK_DISABLE_JIT`` forbids compiling."""
    return os.environ.get("DSA_TOPK_DISABLE_JIT", "").strip().lower() not in ("", "0", "false", "no", "off")


def configured_archs() -> tuple[str, ...] | None:
    """Targets named by ``DSA_TOPK_CUDA_ARCHS``, None if it is not set."""
    text = os.environ.get("DSA_TOPK_CUDA_ARCHS", "").strip()
    if not text:
        return None
    try:
        return arch_names.parse(text)
    except ValueError as error:
        raise ValueError(f"DSA_TOPK_CUDA_ARCHS:{str(error).removeprefix('archs:')}") from None


def cache_dir() -> Path:
    """The folder asked for: ``DSA_TOPK_CACHE_DIR``, else ``~/.cache/dsa-topk``."""
    if text := os.environ.get("DSA_TOPK_CACHE_DIR", "").strip():
        return Path(text).expanduser().absolute()
    return Path(os.path.expanduser("~")) / ".cache" / "dsa-topk"


def fallback_dir() -> Path:
    """Private folder used when the cache cannot be; its owner and mode are checked like any other's."""
    return Path(tempfile.gettempdir()) / f"dsa-topk-cache-{os.geteuid()}"


def warn_once(text: str) -> None:
    """Warn about an environment that was worked around, once per process and text."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"dsa-topk: {text}", RuntimeWarning, stacklevel=3)


def usable_stores(*, warn: bool = True) -> list[Store]:
    """Folders that builds may be loaded from: the cache, then the fallback; unsafe ones are refused with a warning."""
    stores: list[Store] = []
    for folder in (cache_dir(), fallback_dir()):
        store = Store(folder)
        if problem := store.problem():
            if warn and not stores:  # an unsafe fallback matters only to those who need it
                warn_once(f"cache folder refused, since loading a module from it would run foreign code: {problem}")
            continue
        stores.append(store)
    return stores


class Finder:
    """Looks for builds of one snapshot of the sources.

    Parameters
    ----------
    folder, unit : Path, str
        The sources and the unit that is compiled.
    aot : Path
        Folder with builds that came with the package.
    """

    def __init__(self, folder: Path = source.CSRC, unit: str = source.UNIT, aot: Path = AOT) -> None:
        self.sources = source.snapshot(folder, unit)
        self.content = source.content_key(self.sources)
        self.aot = Store(aot)

    def key(self, compiler_version: str | None, archs: tuple[str, ...]) -> str:
        """Entry name; without a compiler its part is ``any``."""
        part = source.compiler_key(compiler_version) if compiler_version else "any"
        return source.entry_name(self.content, part, archs)

    def compiler_version(self, stores: Sequence[Store]) -> tuple[toolchain.Nvcc, str] | None:
        """nvcc and its version text, None if there is none that runs."""
        nvcc = toolchain.search().nvcc
        if nvcc is None:
            return None
        cache_file = next((s.root / "compilers.json" for s in stores if s.root.is_dir()), None)
        try:
            return nvcc, toolchain.version(nvcc.path, cache_file)
        except (JitError, OSError) as error:
            log.warning("ignoring %s: %s", nvcc.path, error)
            return None

    def packaged(self, wanted: Sequence[str], whole: bool) -> Build | None:
        """A build inside the package, made of these very sources by whatever compiler."""
        begin = time.perf_counter()
        for name in self.aot.names():
            try:
                manifest = self.aot.read(name)
                if manifest.sources != self.sources.digest or not _serves(manifest.archs, wanted, whole):
                    continue
                # Rights are not checked here: who can write to the package can change its Python as well.
                if _sha256(self.aot.module(name)) != manifest.sha256:
                    raise ValueError(f"{self.aot.module(name)} is damaged")
            except (ValueError, OSError) as error:
                warn_once(f"build in the package ignored: {error}")
                continue
            return Build(self.aot.module(name), name, manifest.archs, "package", time.perf_counter() - begin)
        return None

    def candidates(self, store: Store, compiler_part: str | None, wanted: Sequence[str], whole: bool) -> list[str]:
        """Entries of a store that would serve, best first: the best target, then the fewest targets."""
        found = []
        for age, name in enumerate(store.names()):
            parts = source.split_name(name)
            if parts is None or parts[0] != self.content or compiler_part not in (None, parts[1]):
                continue
            if _serves(parts[2], wanted, whole):
                rank = 0 if whole else next(i for i, arch in enumerate(wanted) if arch in parts[2])
                found.append((rank, len(parts[2]), age, name))
        return [name for *_, name in sorted(found)]

    def cached(
        self, stores: Sequence[Store], compiler_part: str | None, wanted: Sequence[str], whole: bool
    ) -> tuple[Build | None, str | None]:
        """The first whole entry, else None; and why a damaged one was passed over."""
        begin = time.perf_counter()
        complaint = None
        for store in stores:
            for name in self.candidates(store, compiler_part, wanted, whole):
                try:
                    manifest = store.verify(name)
                except ValueError as error:
                    complaint = str(error)
                    continue
                build = Build(store.module(name), name, manifest.archs, "cached", time.perf_counter() - begin)
                return build, complaint
        return None, complaint


def _serves(have: Sequence[str], wanted: Sequence[str], whole: bool) -> bool:
    return set(wanted) <= set(have) if whole else not set(wanted).isdisjoint(have)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def obtain(
    to_build: tuple[str, ...],
    wanted: Sequence[str] | None = None,
    *,
    cache: Path | None = None,
    finder: Finder | None = None,
    compile_missing: bool = True,
) -> Build | None:
    """Find the build, or make it.

    Parameters
    ----------
    to_build : tuple of str
        Targets to compile if nothing is found.
    wanted : sequence of str, optional
        Targets of which one is enough, best first; default: all of ``to_build`` must be in the build.
    cache : Path, optional
        The one folder to use; an unusable one is then an error. Default: the configured cache with its fallback.
    compile_missing : bool
        False: return None instead of compiling.

    Raises
    ------
    JitError, MissingBuildError
        See :func:`dsa_topk.jit.load`.
    """
    finder = finder or Finder()
    whole = wanted is None
    wanted = to_build if wanted is None else wanted
    if cache is None:
        if packaged := finder.packaged(wanted, whole):
            return packaged
        stores = usable_stores(warn=compile_missing)
    else:
        store = Store(cache)
        if problem := store.problem():
            raise JitError(f"cache folder refused, since loading from it would run foreign code: {problem}")
        stores = [store]
    # A compiler that must not or cannot be used has no say in which build is right.
    found = None if disabled() else finder.compiler_version(stores)
    part = source.compiler_key(found[1]) if found else None
    build, complaint = finder.cached(stores, part, wanted, whole)
    if build or not compile_missing:
        return build
    if complaint:
        log.warning("%s: building again", complaint)
    if disabled():
        looked_in = ", ".join([str(finder.aot.root), *(str(s.root) for s in stores)])
        found = finder.compiler_version(stores)
        key = finder.key(found[1] if found else None, to_build)
        raise MissingBuildError(key, archs=",".join(to_build), looked_in=looked_in, detail=complaint)
    if found is None:
        tried = "; ".join(f"{how}: {what}" for how, what in toolchain.search().tried)
        raise JitError(
            f"no cached build for {', '.join(to_build)} and no usable nvcc ({tried})", hint=toolchain.NO_NVCC_HINT
        )
    if problem := toolchain.host_compiler_problem():
        raise JitError(problem, hint=toolchain.NO_NVCC_HINT)
    return _build_somewhere(finder, stores, found, to_build, strict=cache is not None)


def _build_somewhere(
    finder: Finder,
    stores: Sequence[Store],
    found: tuple[toolchain.Nvcc, str],
    archs: tuple[str, ...],
    *,
    strict: bool,
) -> Build:
    """Build into the first folder that can be written; a folder for this process alone is the last resort."""
    for store in stores:
        try:
            return _build(finder, store, found, archs)
        except OSError as error:
            if error.errno in FULL:
                raise JitError(
                    f"cannot store the build in {store.root}: {error.strerror}",
                    hint="free some space or point DSA_TOPK_CACHE_DIR to another disk",
                ) from error
            if error.errno not in READ_ONLY or strict:
                raise JitError(
                    f"cannot store the build in {store.root}: {error}",
                    hint="point DSA_TOPK_CACHE_DIR to a folder of yours",
                ) from error
            warn_once(f"cannot write to the cache folder {store.root} ({error.strerror}); building elsewhere")
    try:
        last = Path(tempfile.mkdtemp(prefix="dsa-topk-cache-"))
        _remove_at_exit(last)
        return _build(finder, Store(last), found, archs)
    except OSError as error:
        raise JitError(
            f"no folder to build in: {error}", hint="point DSA_TOPK_CACHE_DIR to a folder of yours that can be written"
        ) from error


def _remove_at_exit(folder: Path) -> None:
    owner = os.getpid()  # a forked child must not take its parent's module away

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def _build(finder: Finder, store: Store, found: tuple[toolchain.Nvcc, str], archs: tuple[str, ...]) -> Build:
    """Compile into a private folder and publish it. OSError: the folder's fault; JitError: the compiler's."""
    begin = time.perf_counter()
    nvcc, version = found
    key = finder.key(version, archs)
    store.create()
    if problem := store.problem():  # somebody else may have made it in between
        raise PermissionError(errno.EACCES, problem)
    store.clean()
    with store.lock(key) as locked:
        if not locked:
            log.warning("no lock for %s: building without (safe, perhaps double work)", key)
        try:
            store.verify(key)
            return Build(store.module(key), key, archs, "waited", time.perf_counter() - begin)
        except ValueError as error:
            if (store.root / key).exists():
                store.move_aside(key)
                warn_once(f"damaged cache entry moved aside and built again: {error}")
        log.info("compiling the CUDA module for %s with %s", ", ".join(archs), nvcc.path)
        with store.staging(key) as work:
            # Sources and compiler leftovers live beside the entry-to-be, not in it: only the entry is published.
            scratch, entry = work / "scratch", work / "entry"
            for folder in (scratch / "tmp", scratch / "src", entry):
                folder.mkdir(parents=True)
            finder.sources.write_to(scratch / "src")
            words = compiler.command(nvcc.path, archs, finder.sources.units, link=toolchain.toolkit_root(nvcc.path))
            words += ["-o", str(entry / MODULE)]
            compiler.execute(words, scratch / "src", scratch / "tmp", store.root / f"{key}.log")
            data = (entry / MODULE).read_bytes()
            if problem := elf_problem(data):
                raise JitError(f"the compiler reported success but left {problem}", hint="is the disk full?")
            manifest = Manifest(
                key=key,
                sources=finder.sources.digest,
                archs=archs,
                compiler=version,
                flags=(*source.DEVICE_FLAGS, *source.LINK_FLAGS, *source.ambient_flags()),
                tvm_ffi=source.tvm_ffi_version() or "",
                sha256=hashlib.sha256(data).hexdigest(),
                size=len(data),
                seconds=round(time.perf_counter() - begin, 3),
            )
            store.publish(entry, manifest)
    return Build(store.module(key), key, archs, "built", time.perf_counter() - begin)
