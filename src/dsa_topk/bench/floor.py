"""The floor: how long it takes merely to read the windows of a case, best launch shape, no PDL.

The kernel is csrc/floor.cu, built by the package's own builder (or found prebuilt beside the peers' objects).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from .cases import ELEMENT_BYTES, Case
from .inputs import Problem

SOURCES = Path(__file__).resolve().parent / "csrc"
MOST_BLOCKS = 1 << 20  # rows times splits: a block writes one word
FLUSH_BYTES = 256 << 20  # read to empty an L2 of 50 MB


class NoFloor(Exception):
    """Why there is no floor on this machine."""


@dataclass(frozen=True)
class Grid:
    """A launch shape: blocks per row, threads per block, 16-byte loads in flight per thread."""

    splits: int
    threads: int
    unroll: int


SHAPES = ((256, 4), (512, 4), (1024, 4), (256, 8), (512, 8), (128, 4))


def grids(case: Case, multiprocessors: int, near: Grid | None = None, near_rows: int = 1) -> list[Grid]:
    """Launch shapes worth trying for a case.

    Without a neighbour: 1 to 32 blocks per multiprocessor, all block shapes (up to 36). With the best one of a
    neighbouring case: about as many blocks as there, half and double (8 to 12).
    """
    longest = max(1, math.ceil(case.width * ELEMENT_BYTES[case.dtype] / 2048))  # a block reads 2 KB at least
    limit = max(1, MOST_BLOCKS // case.rows)

    def splits(blocks: float) -> int:
        return max(1, min(round(blocks / case.rows), longest, limit))

    if near is None:
        counts = sorted({splits(multiprocessors * 2**i) for i in range(6)})
        return [Grid(count, *shape) for count in counts for shape in SHAPES]
    blocks = near.splits * near_rows
    around = sorted({splits(blocks * factor) for factor in (0.5, 1, 2)} | {splits(multiprocessors * 4)})
    found = {Grid(count, near.threads, near.unroll): None for count in around}
    found.update({Grid(splits(blocks), *shape): None for shape in SHAPES})
    return list(found)


class Floor:
    """The loaded kernel on one device.

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    library : Path, optional
        A built library; default: built or found by :func:`locate`.

    Raises
    ------
    NoFloor
        When it can be neither found nor built.
    """

    def __init__(self, device: torch.device, library: Path | None = None) -> None:
        self.device = device
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._read = ctypes.CDLL(str(library or locate(device))).dsa_floor_read
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._read.argtypes = [pointer, ctypes.c_int64, pointer, pointer, *[integer] * 5, pointer, pointer]
        self._sink = torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=device)
        self._waste = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self._waste_length = torch.tensor([FLUSH_BYTES // 4], dtype=torch.int32, device=device)
        self._best: dict[tuple[str, str, str], tuple[Grid, int]] = {}

    def read(self, problem: Problem, scores: torch.Tensor, grid: Grid) -> None:
        """Launch one read of all windows of ``scores`` on the current stream."""
        self._launch(scores, problem.row_starts, problem.lengths, scores.shape[0], grid)

    def flush(self) -> None:
        """Launch a read that leaves nothing of the score buffers in L2."""
        self._launch(self._waste[None], None, self._waste_length, 1, Grid(8 * self.multiprocessors, 512, 8))

    def near(self, case: Case) -> tuple[Grid, int] | None:
        """The best grid of the last case of the same kind, and that case's rows."""
        return self._best.get((case.geometry[0], case.dtype, case.regime))

    def remember(self, case: Case, grid: Grid) -> None:
        """Start the search of the next case of this kind from ``grid``."""
        self._best[case.geometry[0], case.dtype, case.regime] = (grid, case.rows)

    def _launch(
        self, scores: torch.Tensor, starts: torch.Tensor | None, lengths: torch.Tensor, rows: int, grid: Grid
    ) -> None:
        error = self._read(
            scores.data_ptr(),
            scores.stride(0) * scores.element_size(),
            None if starts is None else starts.data_ptr(),
            lengths.data_ptr(),
            rows,
            scores.element_size(),
            grid.splits,
            grid.threads,
            grid.unroll,
            self._sink.data_ptr(),
            torch.cuda.current_stream(self.device).cuda_stream,
        )
        if error:
            raise RuntimeError(f"floor kernel: launch of {grid} on {rows} rows failed with CUDA error {error}")


def locate(device: torch.device) -> Path:
    """The library for a device: built into the package's cache, else prebuilt (``dsa_floor.so`` beside the peers)."""
    import tvm_ffi  # noqa: F401  the builder links every unit against it: it must be loaded first

    from .. import jit
    from ..jit import archs
    from ..jit.core import Finder
    from . import peers

    arch = archs.native(torch.cuda.get_device_capability(device))
    try:
        build = jit.obtain((arch,), finder=Finder(SOURCES, "floor.cu"))
    except jit.JitError as error:
        for folder in peers.folders():
            if (path := folder / "dsa_floor.so").exists():
                return path
        raise NoFloor(str(error)) from error
    assert build is not None  # compile_missing is on: a build, or an error
    return build.path
