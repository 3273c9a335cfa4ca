"""Finding nvcc (CUDA_HOME, pip wheels, PATH, /usr/local/cuda), its version and toolkit root, and TVM-FFI's files."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .errors import JitError

NO_NVCC_HINT = (
    "one of: (1) install a CUDA toolkit and set CUDA_HOME; (2) pip install '.[nvcc]' in the checkout; (3) bring a "
    'build made elsewhere with `dsa-topk build` (DSA_TOPK_CACHE_DIR), or use backend="torch"'
)


@dataclass(frozen=True)
class Nvcc:
    """A compiler that was found, and by which rule (``how``)."""

    path: Path
    how: str


@dataclass(frozen=True)
class Search:
    """Outcome of looking for nvcc: the first hit, and every place that was tried with what was there."""

    nvcc: Nvcc | None
    tried: tuple[tuple[str, str], ...]


def _wheel_nvcc() -> str | None:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return None
    try:
        return find_nvidia_binary_utility("nvcc")
    except Exception:  # A broken wheel must not hide an nvcc on PATH; the search records the miss.
        return None


def search() -> Search:
    """Look for nvcc; runs nothing."""
    tried: list[tuple[str, str]] = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            path = Path(home).expanduser() / "bin" / "nvcc"
            if os.access(path, os.X_OK) and path.is_file():
                return Search(Nvcc(path, variable), (*tried, (variable, str(path))))
            tried.append((variable, f"no executable {path}"))
        else:
            tried.append((variable, "not set"))
    others = (
        ("cuda.pathfinder", _wheel_nvcc),
        ("PATH", lambda: shutil.which("nvcc")),
        ("/usr/local/cuda", lambda: shutil.which("nvcc", path="/usr/local/cuda/bin")),
    )
    for how, find in others:
        if found := find():
            return Search(Nvcc(Path(found), how), (*tried, (how, found)))
        tried.append((how, "nothing found"))
    return Search(None, tuple(tried))


def host_compiler_problem() -> str | None:
    """Why nvcc would not find a host compiler; None when one is there or is named in nvcc's own variables."""
    words = [w for v in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS") for w in shlex.split(os.environ.get(v, ""))]
    named = any(w.startswith(("-ccbin", "--compiler-bindir")) for w in words)
    if named or os.environ.get("NVCC_CCBIN") or shutil.which("g++"):
        return None
    return "nvcc needs a host compiler, but there is no g++ on PATH (install gcc and g++, or set NVCC_CCBIN)"


def _run(nvcc: Path, *args: str) -> str:
    try:
        done = subprocess.run(
            [nvcc, *args], capture_output=True, text=True, errors="replace", timeout=60, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JitError(f"{nvcc} cannot be run: {error}", hint=NO_NVCC_HINT) from error
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise JitError(
            f"{nvcc} {' '.join(args)} failed with exit code {done.returncode}",
            first_error=output[0] if output else None,
            hint=NO_NVCC_HINT,
        )
    return done.stdout + done.stderr


def version(nvcc: Path, cache_file: Path | None = None) -> str:
    """The compiler's version text (release and build line).

    Remembered in ``cache_file`` by path, mtime and size for a real binary. A wrapper script is asked each time: its own
    mtime says nothing about the compiler behind it.
    """
    stat = nvcc.stat()
    stamp = [stat.st_mtime_ns, stat.st_size]
    with nvcc.open("rb") as file:
        binary = file.read(4) == b"\x7fELF"
    known: dict[str, list[object]] = {}
    if cache_file is not None and binary:
        known = _read_versions(cache_file)
        if (hit := known.get(str(nvcc))) and hit[:2] == stamp:
            return str(hit[2])
    lines = [line.strip() for line in _run(nvcc, "--version").splitlines() if line.strip()]
    text = " | ".join(line for line in lines if re.match(r"Cuda compilation|Build cuda", line)) or " | ".join(lines)
    if not text:
        raise JitError(f"{nvcc} --version printed nothing", hint=NO_NVCC_HINT)
    if cache_file is not None and binary:
        _write_versions(cache_file, {**known, str(nvcc): [*stamp, text]})
    return text


def _read_versions(path: Path) -> dict[str, list[object]]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {k: v for k, v in data.items() if isinstance(v, list) and len(v) == 3 and isinstance(v[2], str)}


def _write_versions(path: Path, data: dict[str, list[object]]) -> None:
    """Replace the file in one step; not being able to (read-only, full) only costs time later."""
    name = None
    try:
        handle, name = tempfile.mkstemp(prefix=".partial-", dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(data, file)
        os.replace(name, path)
    except OSError:
        if name is not None:
            Path(name).unlink(missing_ok=True)


def release(version_text: str) -> tuple[int, int] | None:
    """CUDA release of a version text, e.g. ``(13, 0)``."""
    match = re.search(r"release (\d+)\.(\d+)", version_text)
    return (int(match[1]), int(match[2])) if match else None


def toolkit_root(nvcc: Path) -> Path:
    """Toolkit folder, asked of nvcc itself: the file found may be a wrapper script outside the toolkit."""
    match = re.search(r"^#\$ _HERE_=(.+)$", _run(nvcc, "--dryrun", "-x", "cu", os.devnull), re.MULTILINE)
    return Path(match[1].strip()).parent if match else nvcc.resolve().parent.parent


def library_dirs(root: Path) -> list[Path]:
    """Folders with cudart: pip wheels have ``lib`` only while nvcc's profile there points to ``lib64``."""
    return [path for path in (root / "lib64", root / "lib") if path.is_dir()]


def tvm_ffi_paths() -> tuple[list[Path], Path]:
    """Include folders and the folder of libtvm_ffi.

    Raises
    ------
    JitError
        If apache-tvm-ffi is not installed or has no headers.
    """
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or not spec.submodule_search_locations:
        raise JitError("apache-tvm-ffi is not installed", hint="pip install apache-tvm-ffi")
    home = Path(next(iter(spec.submodule_search_locations)))
    if (home / "include/tvm/ffi/c_api.h").is_file() and (home / "lib/libtvm_ffi.so").is_file():
        return [home / "include"], home / "lib"
    # Another layout (a source checkout): its own lookup knows, at the price of importing it.
    from tvm_ffi import libinfo

    try:
        includes = {Path(libinfo.find_include_path()), Path(libinfo.find_dlpack_include_path())}
        return sorted(includes), Path(libinfo.find_libtvm_ffi()).parent
    except RuntimeError as error:
        raise JitError(f"apache-tvm-ffi: {error}", hint="reinstall apache-tvm-ffi") from error


def driver_release() -> tuple[int, int] | None:
    """CUDA release that the installed driver supports; None without a driver."""
    import ctypes

    try:
        value = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(value)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return value.value // 1000, value.value % 1000 // 10
