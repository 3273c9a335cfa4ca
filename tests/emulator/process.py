"""Talks to an emulator process: one launch at a time, tensors in, tensors out (protocol in server.h)."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

_ENVIRONMENT = {
    # leaks: a launch that failed abandons its fibers. use-after-return would put frames where no fiber stack is.
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


class EmulationError(AssertionError):
    """The emulated launch failed: a deadlock, a write outside a buffer, a sanitizer's report, a crash."""


@dataclass(slots=True)
class Buffer:
    """One pointer argument. ``tensor`` may be a view with any stride; only its elements exist in the emulator.

    ``mode``: "r" input, "w" output (garbage before the launch), "k" workspace that is kept between launches under
    ``keep`` and starts as zeros. ``offset`` is where its address goes in the args (-1 = nowhere).
    """

    offset: int
    tensor: torch.Tensor
    mode: str = "r"
    keep: int = 0

    def layout(self) -> tuple[int, int, int]:
        """Rows, bytes of a row, bytes from one row to the next."""
        t = self.tensor
        size = t.element_size()
        if t.numel() == 0:
            return 0, 0, 0
        if t.dim() == 0:
            return 1, size, size
        if t.dim() == 1:
            dense = t.stride(0) == 1 or t.numel() == 1
            return (1, t.numel() * size, 0) if dense else (t.numel(), size, t.stride(0) * size)
        if t.dim() != 2 or (t.stride(1) != 1 and t.shape[1] != 1):
            raise ValueError(f"tensor: expected 1-D, or 2-D with unit last stride, got {tuple(t.shape)} {t.stride()}")
        return t.shape[0], t.shape[1] * size, t.stride(0) * size if t.shape[0] > 1 else 0

    def read(self) -> bytes:
        # A copy, as one element of stride 0 counts as contiguous but can't be viewed as bytes.
        flat = self.tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes()

    def write(self, data: bytes) -> None:
        if data:
            got = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(self.tensor.dtype)
            self.tensor.copy_(got.reshape(self.tensor.shape))


@dataclass(slots=True)
class Options:
    """How to run a launch; -1 = drawn from the seed (server.h and cpu_sched.h say what the values mean)."""

    seed: int = 0
    schedule: int = -1  # 0 random, 1 burst, 2 priority, 3 in order
    preempt: int = -1  # chance in 1024
    latency: int = -1  # of asynchronous copies: 0 eager, 1 medium, 2 lazy
    resident: int = -1  # clusters (blocks) on the device at once
    pdl: bool = False
    max_switches: int = 100_000_000
    strict_sites: bool = True


@dataclass(slots=True)
class Stats:
    """What the last launch of the request counted."""

    switches: int
    collectives: int
    barriers: int
    atomics: int
    async_copies: int
    spins: int


@dataclass(slots=True)
class Process:
    """An emulator executable, started on first use and again after a crash."""

    program: Path
    timeout: float = 120.0
    _child: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = field(default=None, repr=False)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
            self._child = subprocess.Popen(
                [str(self.program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **_ENVIRONMENT},
            )
        return self._child

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()
            self._child = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def __del__(self) -> None:
        self.close()

    def _died(self) -> EmulationError:
        assert self._child is not None
        assert self._log is not None
        code = self._child.wait()
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        self.close()
        lines = [line for line in text.splitlines() if line.strip()]
        first = next((i for i, line in enumerate(lines) if "ERROR:" in line or "runtime error" in line), 0)
        return EmulationError(f"the emulator died with status {code}:\n" + "\n".join(lines[first : first + 25]))

    def _read(self, stream: IO[bytes], n: int, deadline: float) -> bytes:
        data = bytearray()
        fd = stream.fileno()
        while len(data) < n:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                self.close()
                raise EmulationError(f"no answer within {self.timeout:.0f} s: an endless loop in the kernel")
            got = os.read(fd, n - len(data))
            if not got:
                raise self._died()
            data += got
        return bytes(data)

    def _read_line(self, stream: IO[bytes], deadline: float) -> str:
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self._read(stream, 1, deadline)
        return line.decode()

    def launch(self, entry: str, args: bytes, buffers: Sequence[Buffer], options: Options | None = None) -> Stats:
        """Run ``entry`` and fill the tensors of the "w" and "k" buffers.

        Raises
        ------
        EmulationError
            If anything but a clean end came of it.
        """
        o = options or Options()
        head = [
            f"launch {entry} {len(args)} {len(buffers)} {o.seed} {o.schedule} {o.preempt} {o.latency} {o.resident}"
            f" {int(o.pdl)} {o.max_switches} {int(o.strict_sites)}\n"
        ]
        body = [args]
        sizes = []
        for b in buffers:
            rows, row_bytes, stride = b.layout()
            align = b.tensor.data_ptr() % 128 if b.tensor.numel() else 0
            head.append(f"buffer {b.offset} {rows} {row_bytes} {stride} {align} {b.mode} {b.keep}\n")
            sizes.append(rows * row_bytes)
            if b.mode == "r":
                body.append(b.read())
        child = self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        deadline = time.monotonic() + self.timeout
        try:
            child.stdin.write("".join(head).encode() + b"".join(body))
            child.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        line = self._read_line(child.stdout, deadline).split()
        if line[0] == "error":
            raise EmulationError(self._read(child.stdout, int(line[1]), deadline).decode(errors="replace"))
        for b, size in zip(buffers, sizes, strict=True):
            if b.mode != "r":
                b.write(self._read(child.stdout, size, deadline))
        return Stats(*(int(x) for x in line[1:]))
