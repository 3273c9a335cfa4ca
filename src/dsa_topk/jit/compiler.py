"""One nvcc run: the command line, and its failure as a readable error (first error, command, log, hint)."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from . import source, toolchain
from .errors import JitError

TIMEOUT_S = 1800.0
_ERROR = re.compile(r"\berror\b|\bfatal\b|undefined reference|cannot find|No space left|not found", re.IGNORECASE)
_HINTS = (
    (
        r"Unsupported \.version",
        "nvcc's parts come from different releases: pip install nvidia-nvvm and nvidia-cuda-crt of nvcc's own release",
    ),
    (r"No space left on device|Disk quota exceeded|File size limit|File too large", "the disk (or quota) is full"),
    (
        r"Unsupported gpu architecture",
        "this nvcc does not know that target: sm_90a needs CUDA 12.0, sm_100 and sm_120 need CUDA 12.8; install a "
        "newer toolkit and set CUDA_HOME, or pip install '.[nvcc]' in the checkout",
    ),
    (
        r"unsupported GNU version|host compiler|(?:g\+\+|gcc): (?:not found|No such)|Failed to preprocess",
        "nvcc needs a host compiler that it supports: install gcc and g++ or point NVCC_CCBIN to one",
    ),
    (r"cudart_static", "the toolkit lacks libcudart_static.a: pip install nvidia-cuda-runtime==13.*, or set CUDA_HOME"),
    (r"tvm/ffi/|dlpack/|-ltvm_ffi", "reinstall apache-tvm-ffi (its headers or library were not found)"),
    (
        r"cuda_runtime(?:_api)?\.h|cuda_bf16|nv/target",
        "the toolkit's headers are incomplete: pip install '.[nvcc]' in the checkout",
    ),
)


def command(
    nvcc: Path, archs: tuple[str, ...], units: Sequence[str], extra: Sequence[str] = (), *, link: Path | None = None
) -> list[str]:
    """The nvcc command for ``units`` in the current folder; with ``link`` the toolkit's root, as a shared module."""
    includes, tvm_lib = toolchain.tvm_ffi_paths()
    words = [str(nvcc), *source.DEVICE_FLAGS, *source.gencode(archs), "-I.", *(f"-I{path}" for path in includes)]
    if link is not None:
        # The root's own folders are named because pip wheels have no lib64, where their nvcc.profile points.
        folders = [*toolchain.library_dirs(link), tvm_lib]
        words += [*source.LINK_FLAGS, "--threads=0", *(f"-L{path}" for path in folders), "-ltvm_ffi"]
    return [*words, *extra, *units]


def execute(words: Sequence[str], folder: Path, temporary: Path, log_to: Path | None = None) -> str:
    """Run a compiler command in ``folder`` with its temporary files in ``temporary``; return what it printed.

    Raises
    ------
    JitError
        If it fails or takes longer than half an hour.
    """
    begin = time.monotonic()
    env = {**os.environ, "TMPDIR": str(temporary), "LC_ALL": "C"}  # error lines are matched in English
    try:
        # An own session, so that an interrupt takes nvcc's children down as well.
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise JitError(f"{words[0]} cannot be run: {error}", hint=toolchain.NO_NVCC_HINT) from error
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise JitError(f"the compiler did not finish in {TIMEOUT_S:.0f} s", command=shlex.join(words)) from error
        raise
    if process.returncode != 0:
        text = f"cd {folder} && {shlex.join(words)}"
        raise failure(output, process.returncode, text, temporary, log_to, time.monotonic() - begin)
    return output


def failure(
    output: str, code: int, command_text: str, temporary: Path, log_to: Path | None, seconds: float
) -> JitError:
    """The error for a failed run; its whole output goes to ``log_to``, or to a temporary file if that fails."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    first = next((line for line in lines if _ERROR.search(line)), lines[0] if lines else "(no output)")
    hint = next((text for pattern, text in _HINTS if re.search(pattern, output)), None)
    if hint is None:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(temporary).free < 1 << 20:
                hint = "the disk is full"
    if hint is None and code in (-9, 137):
        hint = "the compiler was killed, perhaps for want of memory"
    log = _write_log(f"$ {command_text}\n# exit code {code} after {seconds:.1f} s\n{output}", log_to)
    return JitError(
        f"compiling the CUDA module failed (exit code {code})",
        first_error=first,
        command=command_text,
        log=log,
        hint=hint or "if the log does not explain it, report it together with the output of `dsa-topk info`",
    )


def _write_log(text: str, wanted: Path | None) -> Path | None:
    if wanted is not None:
        partial = wanted.with_name(f".partial-{os.getpid()}-{wanted.name}")
        try:
            partial.write_text(text)
            os.replace(partial, wanted)
            return wanted
        except OSError:
            partial.unlink(missing_ok=True)
    try:
        handle, name = tempfile.mkstemp(prefix="dsa-topk-build-", suffix=".log")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        return Path(name)
    except OSError:
        return None
