"""The CUDA kernels on the CPU: fills the outputs of a ``Call`` as the cuda backend would."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from dsa_topk._call import Call

from .args import kernels, pack, paths
from .build import BOTH, build
from .process import Options, Process, Stats


@dataclass(slots=True)
class Emulated:
    """An emulator process with the real kernels in it."""

    process: Process

    def run(
        self,
        call: Call,
        *,
        kernel: str = "Row128",
        cluster: int = 1,
        margin: float = 4.0,
        options: Options | None = None,
        counters: torch.Tensor | None = None,
    ) -> Stats:
        """Fill ``call.out``, ``call.out_positions`` and ``call.out_scores``.

        Parameters
        ----------
        call : Call
            A checked call with CPU tensors and allocated outputs.
        kernel : str
            A name of csrc/launch.h's ``enum Kernel`` without its k.
        cluster : int
            Blocks of a row, for the kernels that have several.
        margin : float
            Half width of the sampled bracket in standard deviations: small values force the second try.
        options : Options, optional
            Seed and schedule.
        counters : torch.Tensor, optional
            ``[paths]`` int32; receives the number of rows that took each path since the process started.

        Raises
        ------
        EmulationError
            If the launch does not end cleanly.
        """
        if call.scores.shape[0] == 0:
            return Stats(0, 0, 0, 0, 0, 0)
        csrc = self.process.program.parent / "csrc"  # what the program was built from, edited since or not
        number = kernels(csrc)[kernel]
        args, buffers = pack(call, kernel=number, cluster=cluster, margin=margin, counters=counters, csrc=csrc)
        return self.process.launch("topk", args, buffers, options)

    def close(self) -> None:
        """End the process."""
        self.process.close()


def prepare(
    scores: torch.Tensor,
    lengths: torch.Tensor | None,
    k: int,
    *,
    form: str = "positions",
    positions: bool = False,
    **rest: Any,
) -> Call:
    """A ``Call`` with outputs allocated (contiguous), as the public functions make it."""
    rows = scores.shape[0]
    call = Call(form=form, scores=scores, lengths=lengths, k=k, **rest)  # type: ignore[arg-type]
    call.out = torch.empty(rows, k, dtype=torch.int32)
    if positions:
        call.out_positions = torch.empty(rows, k, dtype=torch.int32)
    if call.return_scores:
        call.out_scores = torch.empty(rows, k, dtype=scores.dtype)
    return call


@functools.lru_cache
def emulated(sanitize: bool = False) -> Emulated:
    """The emulator, built on first use; the sanitized one has the kernels of the small build (it compiles slowly)."""
    return Emulated(Process(build("runner", sanitize=sanitize, small=BOTH if sanitize else 0)))


def new_counters() -> torch.Tensor:
    """Zeroed path counters for :meth:`Emulated.run`."""
    return torch.zeros(len(paths()), dtype=torch.int32)
