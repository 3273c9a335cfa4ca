"""Launch choice of the cuda backend: a pure function of the call's sizes and the device's limits.

Nothing here looks at data: lengths live on the device, where each row finds its own path (csrc/filter.cuh).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kernel:
    """One instantiation of csrc/launch.h: what the choice needs to know of it."""

    name: str
    threads: int
    samples: int  # of a row
    room: int  # candidates that surely fit a block: its threads' lists fill unevenly, into a shared overflow of 512


_TABLE = (
    Kernel("Row128", 128, 1024, 1280),
    Kernel("Row128Deep", 128, 2048, 1280),
    Kernel("Row256", 256, 4096, 1800),
    Kernel("Row512", 512, 4096, 3400),
    Kernel("Row512Deep", 512, 8192, 3400),
    Kernel("Cluster512", 512, 4096, 3400),
    Kernel("Cluster512Deep", 512, 8192, 3400),
)
KERNELS = tuple(kernel.name for kernel in _TABLE)
"""The kernels of csrc/launch.h, by their number."""

CLUSTER_SIZES = tuple(range(2, 17))


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the choice depends on. ``clusters[c]`` is how many clusters of ``c`` blocks run at once (0: none)."""

    sms: int
    smem_per_block: int  # bytes
    clusters: tuple[int, ...] = (0,) * 17


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch: which kernel, how many blocks a row, and how wide the sampled bracket is."""

    kernel: str
    cluster: int
    margin: float
    prefetch: int = 0  # bytes of a row's head to ask for before its sample is drawn

    @property
    def number(self) -> int:
        """The kernel's number in csrc/launch.h."""
        return KERNELS.index(self.kernel)

    @property
    def arguments(self) -> tuple[int, int, float, int]:
        """What the compiled module takes: kernel number, blocks a row, margin, prefetch."""
        return self.number, self.cluster, self.margin, self.prefetch

    def __str__(self) -> str:
        blocks = "one block" if self.cluster == 1 else f"a cluster of {self.cluster} blocks"
        return f"kernel {self.kernel}, {blocks} a row, bracket of {self.margin:g} standard deviations"


# A missed bracket costs its row one more pass. Among thousands of rows that is lost in the crowd, and a narrow bracket
# makes every row cheaper; where the launch is hardly longer than a row it is the latency of the call
# (docs/kernel-notes.md).
_MARGIN_MANY, _MARGIN_WAVE, _MARGIN_FEW = 2.6, 3.2, 4.5

# Measured on an H200: the best number of blocks a row for rows up to this width, where the rows leave SMs idle.
_BLOCKS = ((6144, 1), (24576, 2), (49152, 3), (98304, 4), (196608, 6), (393216, 8))


@functools.lru_cache(maxsize=4096)
def choose(rows: int, width: int, k: int, limits: DeviceLimits) -> Plan:
    """Choose the launch for ``rows`` windows of at most ``width`` scores.

    Parameters
    ----------
    rows, width, k : int
        Sizes of the call; ``width`` bounds every row's length.
    limits : DeviceLimits
        Probed once a device.

    Returns
    -------
    Plan
    """
    if rows > 4 * limits.sms:
        many = rows > 12 * limits.sms
        margin = _MARGIN_MANY if many else _MARGIN_WAVE
        names: tuple[str, ...]
        if width <= 12288:
            names, prefetch = ("Row128", "Row128Deep", "Row256", "Row512Deep"), 8192
        elif width <= 24576 or (width <= 40960 and many):
            names, prefetch = ("Row128Deep", "Row256", "Row512Deep"), 16384
        else:
            names, prefetch = ("Row256", "Row512Deep"), 32768 if width <= 49152 or not many else 65536
        return Plan(_first_with_room(names, width, k, 1, margin), 1, margin, prefetch if many or width > 24576 else 0)
    cluster = _cluster_size(rows, width, limits)
    if cluster > 1:
        return Plan(
            _first_with_room(("Cluster512", "Cluster512Deep"), width, k, cluster, _MARGIN_FEW), cluster, _MARGIN_FEW
        )
    return Plan(_first_with_room(("Row512", "Row512Deep"), width, k, 1, _MARGIN_FEW), 1, _MARGIN_FEW)


def expected_candidates(width: int, k: int, samples: int, margin: float) -> float:
    """Scores inside the bracket of a full-width row, on average.

    The rank of the k-th score in a sample of S has the standard deviation ``sqrt(S p (1 - p))``, p = k / width
    (binomial); the bracket spans ``2 margin`` of them, ``width / S`` scores to a sample.
    """
    p = min(k / max(width, 1), 1.0)
    return 2.0 * margin * math.sqrt(samples * p * (1.0 - p)) * width / samples


def _first_with_room(names: tuple[str, ...], width: int, k: int, blocks: int, margin: float) -> str:
    """The first kernel whose lists hold the bracket's candidates, else the last: a full list is exact too, but slow."""
    for name in names:
        kernel = _TABLE[KERNELS.index(name)]
        # Blocks of a cluster send each other up to 2048 (1024 in large clusters) and share a row's candidates unevenly.
        room = kernel.room if blocks == 1 else 0.7 * blocks * (1024 if blocks > 8 else 2048)
        if 1.1 * expected_candidates(width, k, kernel.samples, margin) <= room:  # a tenth for the bins' granularity
            return name
    return names[-1]


def _cluster_size(rows: int, width: int, limits: DeviceLimits) -> int:
    """Blocks a row: what its width can use, as far as all rows still run at once."""
    wanted = next((blocks for bound, blocks in _BLOCKS if width <= bound), 16)
    if wanted == 2 and width < 16384 and rows < 32:
        return 1  # alone, a short row is through before its blocks have met
    return next((size for size in range(wanted, 1, -1) if limits.clusters[size] >= rows), 1)
