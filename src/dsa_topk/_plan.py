"""Launch choice of the cuda backend: a pure function of the call's sizes and the device's limits.

Nothing here looks at data: lengths live on the device, where each row finds its own path (csrc/filter.cuh).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

KERNELS = ("Row128", "Row128Deep", "Row256", "Row512", "Cluster512")
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

    @property
    def number(self) -> int:
        """The kernel's number in csrc/launch.h."""
        return KERNELS.index(self.kernel)

    def __str__(self) -> str:
        blocks = "one block" if self.cluster == 1 else f"a cluster of {self.cluster} blocks"
        return f"kernel {self.kernel}, {blocks} a row, bracket of {self.margin:g} standard deviations"


# A missed bracket costs its row one more pass. Among thousands of rows that is lost in the crowd, and a narrow bracket makes
# every row cheaper; where a launch is a few rows long it doubles the latency of the call.
_MARGIN_MANY, _MARGIN_FEW = 2.6, 4.5


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
    few = rows <= 2 * limits.sms
    margin = _MARGIN_FEW if few else _MARGIN_MANY
    if few:
        cluster = _cluster_size(rows, width, limits)
        if cluster > 1:
            return Plan("Cluster512", cluster, margin)
        return Plan("Row512", 1, margin)
    if width > 49152 or k > 2048:
        return Plan("Row256", 1, margin)
    return Plan("Row128Deep" if width > 12288 else "Row128", 1, margin)


def _cluster_size(rows: int, width: int, limits: DeviceLimits) -> int:
    """Blocks a row, so that the rows fill the device and a block still has a few thousand scores to stream."""
    useful = min(width // 4096, 2 * limits.sms // max(rows, 1), 16)
    for size in range(useful, 1, -1):
        if limits.clusters[size] >= rows:
            return size
    # No size lets all rows run at once: one that needs few waves is still better for very wide rows.
    return 1
