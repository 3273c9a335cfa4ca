"""Launch choice of the cuda backend: a pure function of the call's sizes and the device's limits.

Nothing here looks at data: lengths live on the device, where each row finds its own path (csrc/filter.cuh).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kernel:
    """One instantiation of csrc/launch.h: what the choice needs to know of it."""

    name: str
    threads: int
    samples: int  # of a long row (csrc/bracket.cuh); none where the whole row is held
    room: int  # held: scores of a row, the misalignment of its start included; else candidates that surely fit a block
    several: bool = False  # blocks a row, a cluster
    spread: bool = False  # blocks a row that need not run at the same time


# Room of the Row kernels: their threads' lists fill unevenly, into a shared overflow. Those of 16-bit scores have room
# for more (`_ROOM_16`), and they have no Row256Light of their own, nor a Row512: Row256 stands for both.
_TABLE = (
    Kernel("Row128", 128, 1024, 1280),
    Kernel("Row128Deep", 128, 2048, 1280),
    Kernel("Row256Light", 256, 2048, 1950),
    Kernel("Row256", 256, 4096, 1950),
    Kernel("Row512", 512, 4096, 5000),
    Kernel("Cluster512", 512, 4096, 3400, several=True),
    Kernel("Held4K", 512, 0, 4096),
    Kernel("Held8K", 512, 0, 8192),
    Kernel("Held16K", 512, 0, 16384),
    Kernel("Held16KTwin", 512, 0, 16384),
    Kernel("Held32K", 1024, 0, 32768),
    Kernel("Split512", 512, 4096, 4096, several=True),
    Kernel("Whole512", 512, 2048, 10240),
    Kernel("Whole1024", 1024, 4096, 10240),
    Kernel("Spread512", 512, 8192, 10240, spread=True),
)
_BY_NAME = {kernel.name: kernel for kernel in _TABLE}

_ROOM_16 = {"Row128": 1700, "Row128Deep": 1700, "Row256": 3300}

KERNELS = tuple(_BY_NAME)
"""The kernels of csrc/launch.h, by their number."""

SEVERAL = frozenset(kernel.name for kernel in _TABLE if kernel.several)
"""Those that share a row among the blocks of a cluster."""

SPREAD = frozenset(kernel.name for kernel in _TABLE if kernel.spread)
"""Those that share a row among blocks which meet in a workspace."""

CLUSTER_SIZES = tuple(range(2, 17))


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the choice depends on.

    ``clusters[c]`` is how many clusters of ``c`` blocks run at once (0: none); ``longest_held`` is the longest row that
    the compiled kernels keep in one block's registers without spilling (csrc/resident.cuh).
    """

    sms: int
    smem_per_block: int  # bytes
    clusters: tuple[int, ...] = (0,) * 17
    longest_held: int = 32768


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch: which kernel, how many blocks a row, and how wide the sampled bracket is."""

    kernel: str
    cluster: int
    margin: float
    prefetch: int = 0  # bytes of a row's head to ask for before it is streamed; negative: when its sample has come

    @property
    def number(self) -> int:
        """The kernel's number in csrc/launch.h."""
        return KERNELS.index(self.kernel)

    @property
    def arguments(self) -> tuple[int, int, float, int]:
        """What the compiled module takes: kernel number, blocks a row, margin, prefetch."""
        return self.number, self.cluster, self.margin, self.prefetch

    def __str__(self) -> str:
        several = "{} blocks and a workspace" if self.kernel in SPREAD else "a cluster of {} blocks"
        blocks = "one block" if self.cluster == 1 else several.format(self.cluster)
        return f"kernel {self.kernel}, {blocks} a row, bracket of {self.margin:g} standard deviations"


# A missed bracket costs its row one more pass. Among thousands of rows that is lost in the crowd, and a narrow bracket
# makes every row cheaper; where the launch is hardly longer than a row it is the latency of the call, and so is a list
# that overflows (docs/kernel-notes.md): there the bracket is as wide as the lists have ample room for.
_MARGINS_MANY, _MARGINS_WAVE, _MARGIN_FEW = (2.9, 2.6), (4.0, 3.6, 3.2), 4.5
_SPARE_MANY, _SPARE_WAVE = 1.3, 1.25  # for the width of bins, and for rows whose best scores lie in few places

_LONG_ROW = 98304  # shorter ones have a sample of 2048 (csrc/bracket.cuh)
_SPREAD_WIDTH = 786432  # a cluster's 16 blocks take longer to read such a row than the whole device to meet over it

_ROWS = ("Row128", "Row128Deep", "Row256Light", "Row256", "Row512")
_HELD = tuple(kernel for kernel in _TABLE if kernel.samples == 0)


def choose(rows: int, width: int, k: int, limits: DeviceLimits, aligned: bool = True, element_bytes: int = 4) -> Plan:
    """Choose the launch for ``rows`` windows of at most ``width`` scores.

    Parameters
    ----------
    rows, width, k : int
        Sizes of the call; ``width`` bounds every row's length.
    limits : DeviceLimits
        Probed once a device.
    aligned : bool
        Whether every row surely starts at a multiple of four scores in memory.
    element_bytes : int
        Size of a score: 4 or 2.

    Returns
    -------
    Plan
    """
    if rows > 12 * limits.sms:
        return _choose_many(rows, width, k, limits, element_bytes)
    if rows > 4 * limits.sms:
        return _choose_wave(width, k, element_bytes)
    span = width if aligned else width + 3
    crowded = rows > limits.sms  # two rows on an SM
    held = next((kernel for kernel in _HELD if span <= kernel.room <= limits.longest_held), None)
    # As many blocks a row as still run at once; more than eight do not help rows this short.
    sizes = [size for size in range(16 if width > 32768 else 8, 1, -1) if limits.clusters[size] >= rows]
    # The longest rows are better held than split unless they have five blocks each, and not where they are crowded.
    if held is not None and (held is not _HELD[-1] or not (crowded or (sizes and sizes[0] >= 5))):
        return Plan("Held16KTwin" if crowded and held.name == "Held16K" else held.name, 1, _MARGIN_FEW)
    # Over the whole device without clusters: the longest rows of a few, and where clusters there are none.
    blocks = min(limits.sms // max(rows, 1), width // 8192)
    spread = width >= _SPREAD_WIDTH and blocks >= 8 if sizes else blocks >= 2 and not any(limits.clusters)
    # What a block can leave of a row is less than what the last one gathers (csrc/launch.h).
    if spread and _lists(width, k, "Spread512") and _most(width, k, "Spread512") / blocks <= 0.9 * 4096:
        return Plan("Spread512", blocks, _MARGIN_FEW)
    listed = _most(width, k, "Split512")
    for size in sizes:
        # What a block can send to others is less in large clusters (csrc/launch.h).
        if listed / size <= 0.9 * (2688 if size > 8 else 4096):
            return Plan("Split512", size, _MARGIN_FEW)
    if sizes:
        return Plan("Cluster512", sizes[0], _MARGIN_FEW)
    for name in ("Whole512", "Whole1024") if crowded else ("Whole1024",):
        if _lists(width, k, name):
            return Plan(name, 1, _MARGIN_FEW)
    margins = (_MARGIN_FEW, *_MARGINS_WAVE)
    margin = next((margin for margin in margins if _has_room("Row512", margin, width, k, 1.0)), _MARGINS_MANY[-1])
    return Plan("Row512", 1, margin)


def _choose_many(rows: int, width: int, k: int, limits: DeviceLimits, element_bytes: int) -> Plan:
    """Rows that fill the device several times over: a place that a row leaves is taken by another at once."""
    if width <= 12288:
        first, prefetch = "Row128", 8192
    elif width <= 24576 or (width <= 40960 and (rows > 16 * limits.sms or element_bytes == 2)):
        first, prefetch = "Row128Deep", 16384
    elif width <= 40960:  # not twice as many as run together
        first, prefetch = "Row256Light", 16384
    else:
        # Of the longest rows no two blocks begin at the same time: less is enough to begin with.
        first, prefetch = "Row256Light" if element_bytes == 4 else "Row256", 65536 if width <= 98304 else 32768
    names = _ROWS[_ROWS.index(first) :]
    choices = [(name, margin) for name in names for margin in _MARGINS_MANY]
    return _first_with_room(choices, width, k, element_bytes, _SPARE_MANY, prefetch)


def _choose_wave(width: int, k: int, element_bytes: int) -> Plan:
    """Rows that all begin at once, or at two to four times: what is asked for too early delays the others' samples."""
    if width <= 12288:
        first, prefetch = "Row128", 8192
    elif width <= (20480 if element_bytes == 4 else 36864):
        first, prefetch = "Row128Deep", 16384
    else:
        # A small sample needs a k-th score that is not among its first few.
        first, prefetch = "Row256Light" if element_bytes == 4 and width <= 49152 else "Row256", 32768
    if width > 98304 and element_bytes == 4:
        first, prefetch = "Row512", 65536
    # Rows that are soon over, and 16-bit scores, wait for what is done with candidates more than for the memory.
    margins: tuple[float, ...] = _MARGINS_WAVE
    if first == "Row128":
        margins = _MARGINS_MANY
    elif element_bytes == 2 and first == "Row128Deep":
        margins, prefetch = _MARGINS_MANY, 12288
    elif element_bytes == 2 and width > 98304:
        margins = _MARGINS_WAVE[2:]
    choices = [(name, margin) for name in _ROWS[_ROWS.index(first) :] for margin in margins]
    return _first_with_room(choices, width, k, element_bytes, _SPARE_WAVE, -prefetch)


def _first_with_room(
    choices: list[tuple[str, float]], width: int, k: int, element_bytes: int, spare: float, prefetch: int
) -> Plan:
    """The first kernel and margin with room for the candidates, else the last."""
    enough = (choice for choice in choices if _has_room(*choice, width, k, spare, element_bytes))
    name, margin = next(enough, choices[-1])
    return Plan(name, 1, margin, prefetch)


def expected_candidates(width: int, k: int, samples: int, margin: float) -> float:
    """Scores inside the bracket of a full-width row, on average.

    The rank of the k-th score in a sample of S has the standard deviation ``sqrt(S p (1 - p))``, p = k / width
    (binomial); the bracket spans ``2 margin`` of them, ``width / S`` scores to a sample.
    """
    p = min(k / max(width, 1), 1.0)
    return 2.0 * margin * math.sqrt(samples * p * (1.0 - p)) * width / samples


def most_listed(width: int, k: int, samples: int, margin: float) -> float:
    """As many scores of a full-width row as hardly ever are not below its bracket.

    The bracket ends at rank r of the sample, the k-th score's expected rank, ``margin`` standard deviations and two
    more. The scores above it are ``width / S`` to a sample, and their number has the standard deviation of a Poisson
    count of r samples, of which 5.5 are allowed for: fewer than one row in 100,000 has more.
    """
    if width < _LONG_ROW:
        samples = min(samples, 2048)
    share = min(k / max(width, 1), 1.0)
    rank = samples * share + margin * math.sqrt(samples * share * (1.0 - share)) + 2.0
    return min((rank + 5.5 * math.sqrt(rank)) * width / samples, float(width))


def _most(width: int, k: int, name: str) -> float:
    """As many scores of a row as a kernel for a few rows lists."""
    return most_listed(width, k, _BY_NAME[name].samples, _MARGIN_FEW)


def _lists(width: int, k: int, name: str) -> bool:
    """Whether the list of a kernel that takes a row by one block, or gathers it in one, holds it."""
    return _most(width, k, name) <= _BY_NAME[name].room


def _has_room(name: str, margin: float, width: int, k: int, spare: float, element_bytes: int = 4) -> bool:
    """Whether a kernel's lists hold the bracket's candidates. A full list is exact too, but slow."""
    kernel = _BY_NAME[name]
    room = kernel.room if element_bytes == 4 else _ROOM_16.get(name, _ROOM_16["Row256"])
    samples = kernel.samples if element_bytes == 4 or kernel.threads < 256 else _BY_NAME["Row256"].samples
    return spare * expected_candidates(width, k, samples, margin) <= room
