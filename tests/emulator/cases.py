"""Calls that the emulated kernels must answer exactly: distributions, edge lengths, forms, layouts, hostile integers.

Each group is a function that yields cases; tests and mutants run the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsa_topk._call import Call
from dsa_topk.testing import check_selection, distributions, shapes

from .args import held, instances, kernels, paths
from .emulated import Emulated, new_counters, prepare
from .process import EmulationError, Options

FAST = paths().index("Fast")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# A pool of sizes: below, at and above a warp, odd, and the one that matters; 2048 with rows of a few thousand.
SIZES = ((1, 900), (7, 1003), (64, 1500), (300, 2111), (2048, 5003))


@dataclass(slots=True)
class Case:
    """One call with the way to run it."""

    name: str
    call: Call
    kernel: str
    cluster: int = 1
    margin: float = 4.0
    options: Options = field(default_factory=Options)
    least_fast: int = 0  # rows that must take the fast path: else they are right and slow, which is wrong too

    def run(self, e: Emulated, counters: torch.Tensor | None = None) -> None:
        """Fill the outputs."""
        how: dict[str, Any] = {
            "kernel": self.kernel,
            "cluster": self.cluster,
            "margin": self.margin,
            "options": self.options,
        }
        e.run(self.call, **how, counters=counters)

    def wrong(self, e: Emulated, counters: torch.Tensor | None = None) -> str | None:
        """Run and check; what is wrong, or None."""
        before = 0
        if self.least_fast and counters is None:
            counters = new_counters()  # the emulator counts from its start on: a trivial row shows how far it is
            try:
                e.run(prepare(torch.zeros(1, 8), None, 8), kernel=self.kernel, cluster=self.cluster, counters=counters)
            except EmulationError as error:
                return f"a trivial row before {self.name}: {error}"
            before = int(counters[FAST])
        try:
            self.run(e, counters)
        except EmulationError as error:
            return f"{self.name}: {error}"
        c = self.call
        assert c.out is not None
        verdict = check_selection(
            c.scores,
            c.lengths,
            c.k,
            c.out,
            form=c.form,
            row_starts=c.row_starts,
            out_offsets=c.out_offsets,
            page_table=c.page_table,
            page_size=c.page_size,
            row_to_batch=c.row_to_batch,
            page_table_starts=c.page_table_starts,
            order=c.order,
            tie_break=c.tie_break,
            positions=c.out_positions,
            returned_scores=c.out_scores,
        )
        if verdict.ok and self.least_fast and before + self.least_fast > int(counters[FAST]):  # type: ignore[index]
            return f"{self.name}: {int(counters[FAST]) - before} rows are fast"  # type: ignore[index]
        return None if verdict.ok else f"{self.name}: {verdict.reason}"


# Cluster sizes to try, not only powers of two, of the kernels that spread a row over several blocks.
CLUSTERS = {"Cluster512": (2, 5), "Split512": (2, 3, 5, 16), "Spread512": (2, 7)}


def routes() -> list[tuple[str, int]]:
    """Kernels with the cluster sizes to try."""
    return [(name, size) for name in kernels() for size in CLUSTERS.get(name, (1,))]


# Held kernels whose registers are so short that a crowded bin goes straight to the exact path (csrc/held.cuh, kShort).
NO_SECOND_TRY = frozenset(
    name for name, (threads, each, blocks) in held().items() if blocks * threads * (each + 32) >= 65536
)


def configuration(kernel: str, dtype: torch.dtype = FP32) -> str:
    """The configuration that serves a kernel's number: 16-bit scores may have another one (csrc/launch.h)."""
    return instances()[kernel][dtype != FP32]


def paths_of(kernel: str, dtype: torch.dtype = FP32) -> tuple[str, ...]:
    """Names of the paths of csrc/args.h that a kernel's rows can take."""
    kernel = configuration(kernel, dtype)
    if kernel in NO_SECOND_TRY or kernel.startswith(("Split", "Spread", "Whole")):
        return ("Trivial", "Fast", "Exact")
    if kernel.startswith("Held"):
        return ("Trivial", "Fast", "SecondTry", "Exact")
    return paths()


def edge_lengths(k: int, n: int) -> torch.Tensor:
    """Lengths where something changes: empty, k, the shortest sampled window, the width, out of range."""
    return torch.tensor([n, 0, 1, k - 1, k, k + 1, 255, 256, 257, n - 1, n // 2 + 1, -3, n + 7, 2**31 - 1])


def by_distribution(route: tuple[str, int], dtype: torch.dtype, seed: int = 0) -> Iterator[Case]:
    """Every named distribution with edge lengths; size, tie rule and outputs vary from one to the next."""
    kernel, cluster = route
    for i, name in enumerate(distributions.NAMES):
        k, n = SIZES[(i + seed * 2 + cluster) % len(SIZES)]
        lengths = edge_lengths(k, n)
        if cluster > 1:  # several blocks a row cost as many times more: half of the lengths, another half each time
            lengths = torch.cat([lengths[:1], lengths[1 + i % 2 :: 2]])
        scores = distributions.make(name, len(lengths), n, dtype=dtype, seed=seed, k=k)
        call = prepare(
            scores,
            lengths,
            k,
            tie_break="largest" if (i + seed) % 2 else "smallest",
            return_scores=(i + seed) % 3 == 0,
            positions=i % 4 == 1,
        )
        options = Options(seed=seed * 1000 + i)
        about = f"{name} k={k} n={n} {dtype} {kernel}x{cluster} seed {options.seed}"
        yield Case(about, call, kernel, cluster, options=options)


def by_shape(route: tuple[str, int], seed: int = 0) -> Iterator[Case]:
    """Every named call shape (decode, mtp, ragged, packed, ...) in all forms, page sizes and index types."""
    kernel, cluster = route
    for i, name in enumerate(shapes.NAMES):
        for turn, page_size in enumerate((1, 64, 33, 100)):
            k, n = SIZES[(i + turn + seed) % 4]
            integers = torch.int64 if turn % 2 else torch.int32
            shape = shapes.make(name, rows=9, width=n, k=k, seed=seed + turn, page_size=page_size, index_dtype=integers)
            dtype = (FP32, FP16)[turn // 2]
            kind = ("indexer", "half_zeros", "normal", "all_equal")[(i + turn) % 4]
            scores = distributions.make(kind, 9, n, dtype=dtype, seed=seed, k=k)
            # columns outside of the windows hold what would win if it counted
            starts = shape.row_starts if shape.row_starts is not None else torch.zeros(9, dtype=torch.int64)
            lengths = shape.lengths if shape.lengths is not None else torch.full((9,), n)
            column = torch.arange(n)
            outside = (column < starts[:, None]) | (column >= (starts + lengths.clamp(min=0))[:, None])
            scores[outside] = float("inf") if turn % 2 else float("nan")
            extra = {**shape.kwargs(), "form": shape.form, "positions": turn == 1, "return_scores": turn == 2}
            call = prepare(scores, shape.lengths, k, **extra)
            options = Options(seed=seed * 1000 + i * 10 + turn, pdl=turn % 2 == 1)
            about = f"{name} page {page_size} k={k} n={n} {kernel}x{cluster} seed {options.seed}"
            yield Case(about, call, kernel, cluster, options=options)


def by_layout(route: tuple[str, int], seed: int = 0) -> Iterator[Case]:
    """Every alignment of base, stride and window; strided index vectors; outputs as columns of one buffer."""
    kernel, cluster = route
    k, n = 64, 1003
    for offset in range(4):
        for extra in (0, 1, 2, 3, 29):
            dtype = FP16 if (offset + extra) % 2 else FP32
            stride = n + extra
            storage = torch.full((offset + 6 * stride + 40,), float("inf"), dtype=dtype)
            scores = storage[offset:].as_strided((6, n), (stride, 1), offset)
            scores.copy_(distributions.make("normal", 6, n, dtype=dtype, seed=seed + offset, k=k))
            starts = torch.arange(12)[::2] * 5 + offset
            lengths = (torch.tensor([n, 900, 700, 333, 260, 65]).repeat_interleave(3))[::3]
            both = torch.empty(6, 2 * k + 5, dtype=torch.int32)
            call = Call("positions", scores, lengths, k, row_starts=starts.to(torch.int32)[:], tie_break="smallest")
            call.out, call.out_positions = both[:, 1 : 1 + k], both[:, k + 3 : 2 * k + 3]
            options = Options(seed=seed + offset * 5 + extra)
            about = f"offset {offset} stride {stride} {dtype} {kernel}x{cluster} seed {options.seed}"
            yield Case(about, call, kernel, cluster, options=options)
    # one row for all: stride 0, and rows that overlap like a sliding window
    line = distributions.make("normal", 1, 3 * n, seed=seed, k=k)
    for stride in (0, 7):
        scores = line[0].as_strided((5, n), (stride, 1))
        about = f"row stride {stride} {kernel}x{cluster}"
        yield Case(about, prepare(scores, None, k), kernel, cluster, options=Options(seed=seed))


def far_rows(route: tuple[str, int]) -> Iterator[Case]:
    """Rows more than 2^31 elements apart: an offset in 32 bits reads what is not there."""
    kernel, cluster = route
    k, n = 64, 700
    scores = torch.empty_strided((3, n), ((1 << 31) + 5, 1), dtype=FP16)
    scores.copy_(distributions.make("normal", 3, n, dtype=FP16, seed=3, k=k))
    yield Case(f"rows 2^31 elements apart {kernel}x{cluster}", prepare(scores, None, k), kernel, cluster)
    out = torch.empty_strided((3, k), ((1 << 31) + 3, 1), dtype=torch.int32)
    call = prepare(scores, torch.tensor([n, 10, 300]), k)
    call.out = out
    yield Case(f"outputs 2^31 elements apart {kernel}x{cluster}", call, kernel, cluster)


def by_page_size(route: tuple[str, int], seed: int = 0) -> Iterator[Case]:
    """Rows long enough that a warp's turn of the output touches as many pages as it can; windows and tables that start
    anywhere."""
    kernel, cluster = route
    k = 600
    for i, page_size in enumerate((1, 31, 32, 33, 64, 1000, 70_000)):
        n = 17_003 if page_size in (32, 33) else 5003
        entries = -(-n // page_size) + 3
        table = torch.randperm(4 * entries, generator=torch.Generator().manual_seed(seed + i), dtype=torch.int32)
        starts = torch.tensor([0, 1, 31, 45]) + seed
        call = prepare(
            distributions.make("normal", 4, n, dtype=(FP32, FP16)[(i + seed) % 2], seed=seed + i, k=k),
            n - starts - torch.tensor([0, 0, 70, 3000]),
            k,
            form="paged",
            page_table=table.view(4, entries),
            page_size=page_size,
            row_to_batch=torch.tensor([2, 0, 3, 1]),
            row_starts=starts,
            page_table_starts=torch.tensor([3, 0, 1, 2]),
        )
        about = f"page {page_size} {kernel}x{cluster}"
        yield Case(about, call, kernel, cluster, options=Options(seed=seed * 10 + i))


def clusters(route: tuple[str, int], seed: int = 0) -> Iterator[Case]:
    """Rows whose winners lie side by side: one turn of the output has them all, the others none."""
    kernel, cluster = route
    k, n = 1500, 40_003
    scores = torch.rand(3, n, generator=torch.Generator().manual_seed(seed))
    for row, first in zip(scores, (0, 12_345 + seed, n - k - 20), strict=True):
        row[first : first + k + 20] += 2.0
    table = torch.randperm(3 * 630, generator=torch.Generator().manual_seed(seed), dtype=torch.int32).view(3, 630)
    tie_break = ("smallest", "largest")[seed % 2]
    lengths = torch.tensor([n, n - 3, n])
    call = prepare(scores, lengths, k, tie_break=tie_break, form="paged", page_table=table, page_size=64)
    yield Case(f"winners side by side {kernel}x{cluster}", call, kernel, cluster, options=Options(seed=seed))


EXTREMES = (0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**32 + 5, 2**62, -(2**62), 2**63 - 1, -(2**63), -(2**32) + 3)


def hostile_integers(route: tuple[str, int], seed: int = 0) -> Iterator[Case]:
    """int64 extremes in every integer argument; nothing wraps, nothing is read out of bounds."""
    kernel, cluster = route
    k, n = 7, 300
    rows = len(EXTREMES)
    scores = distributions.make("normal", rows, n, seed=seed, k=k)
    wild = torch.tensor(EXTREMES)
    full = torch.full((rows,), n)
    options = Options(seed=seed)

    def case(name: str, call: Call) -> Case:
        return Case(f"{name} {kernel}x{cluster}", call, kernel, cluster, options=options)

    yield case("lengths", prepare(scores, wild, k))
    yield case("row_starts", prepare(scores, full, k, row_starts=wild))
    yield case("both", prepare(scores, wild.flip(0), k, row_starts=wild))
    yield case("out_offsets", prepare(scores, full, k, form="ragged", out_offsets=wild, positions=True))
    table = torch.randint(0, 1 << 20, (5, 40), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    for page_size in (1, 3, 8, 64, 2**31 - 1):
        paged: dict[str, Any] = {"form": "paged", "page_table": table, "page_size": page_size, "positions": True}
        near = torch.arange(rows) % 5
        yield case(f"row_to_batch page {page_size}", prepare(scores, full, k, row_to_batch=wild, **paged))
        yield case(f"batches page {page_size}", prepare(scores, full, k, row_to_batch=torch.arange(rows) - 3, **paged))
        paged["row_to_batch"] = near
        yield case(f"page_table_starts page {page_size}", prepare(scores, full, k, page_table_starts=wild, **paged))
        last = torch.arange(rows) + 30
        yield case(f"last entries page {page_size}", prepare(scores, full, k, page_table_starts=last, **paged))
    garbage = table.clone()
    garbage[:, ::3] = torch.tensor([-1, -(2**31), 2**31 - 1, 0x7EADBEEF, -7], dtype=torch.int32)[:, None]
    paged = {"form": "paged", "page_size": 8, "row_to_batch": torch.arange(rows) % 5}
    yield case("page entries", prepare(scores, full, k, page_table=garbage, **paged))
    yield case("no tables", prepare(scores, full, k, page_table=torch.empty(0, 40, dtype=torch.int32), **paged))
    yield case("no entries", prepare(scores, full, k, page_table=torch.empty(5, 0, dtype=torch.int32), **paged))
    yield case("no columns", prepare(scores[:, :0], full, k))


def by_order(route: tuple[str, int], seed: int = 0) -> Iterator[Case]:
    """order="score": second launch, both tie rules, all forms."""
    kernel, cluster = route
    for i, name in enumerate(("normal", "half_zeros", "all_equal", "nan_both_signs", "infinities", "mixed_zeros")):
        k, n = ((1, 300), (65, 700), (300, 900))[i % 3]
        scores = distributions.make(name, 5, n, dtype=(FP32, FP16)[i % 2], seed=seed, k=k)
        lengths = torch.tensor([n, k, k - 1, 0, n // 2])
        table = torch.randperm(5 * (n // 16 + 1), dtype=torch.int32).view(5, -1)
        forms: tuple[dict[str, Any], ...] = (
            {},
            {"form": "ragged", "out_offsets": torch.arange(5) * 1000},
            {"form": "paged", "page_table": table, "page_size": 16},
        )
        extra = {**forms[i % 3], "order": "score", "return_scores": i % 2 == 0, "positions": i % 3 == 2}
        call = prepare(scores, lengths, k, tie_break=("smallest", "largest")[i // 2 % 2], **extra)
        about = f"order=score {name} k={k} {kernel}x{cluster}"
        yield Case(about, call, kernel, cluster, options=Options(seed=seed + i))


def narrow_brackets(route: tuple[str, int], seed: int = 0) -> Iterator[Case]:
    """A bracket of hardly any width misses often: the second try and the exact path take over."""
    kernel, cluster = route
    names = ("normal", "indexer", "ascending", "descending", "outliers", "narrow", "half_zeros", "bit_patterns")
    for i, name in enumerate(names):
        k, n = SIZES[(i + seed) % len(SIZES)]
        scores = distributions.make(name, 6, n, seed=seed, k=k)
        lengths = torch.tensor([n, n - 1, n // 2 + k // 2, 400 + k, n, 300 + k]).clamp(max=n)
        call = prepare(scores, lengths, k, tie_break=("smallest", "largest")[i % 2])
        margin = i % 2 / 10
        about = f"margin {margin} {name} k={k} n={n} {kernel}x{cluster}"
        yield Case(about, call, kernel, cluster, margin=margin, options=Options(seed=seed + i))


def crowds(route: tuple[str, int], seed: int = 0) -> Iterator[Case]:
    """Threshold bins fuller than any list, plateaus around the threshold, rows in bad order for per-thread lists."""
    kernel, cluster = route
    generator = torch.Generator().manual_seed(seed)
    n, k = 12000, 2048
    rows = []
    for winners in (0, 1, 100, 2047, 2048, 2049):
        row = torch.zeros(n)
        row[torch.randperm(n, generator=generator)[:winners]] = 1 + torch.rand(winners, generator=generator)
        rows.append(row)
    ladder = (torch.randperm(n, generator=generator) + 0x3F800000).to(torch.int32).view(FP32)
    rows += [ladder, -ladder]
    few = torch.randn(n, generator=generator)
    few[:9000] = 0.5 + torch.arange(9000).remainder(3) * 1e-6
    rows.append(few)
    blocky = torch.full((n,), -1.0)
    blocky[32 * 16 * 3 : 32 * 16 * 3 + 4000] = torch.linspace(1.0, 1.001, 4000)  # one warp's share holds all candidates
    rows.append(blocky)
    # many entries in one bin of a wide bracket: three copies of 200 values that hardly differ, astride the k-th place
    dense = torch.rand(n, generator=generator) * 0.5
    order = torch.randperm(n, generator=generator)
    dense[order[: k - 301]] += 2.0
    dense[order[k - 301 : k + 299]] = (torch.arange(600) // 3 + 0x3FA00000).to(torch.int32).view(FP32)
    rows.append(dense)
    scores = torch.stack(rows)
    for tie_break in ("smallest", "largest"):
        call = prepare(scores, None, k, tie_break=tie_break)
        yield Case(f"crowds {tie_break} {kernel}x{cluster}", call, kernel, cluster, options=Options(seed=seed))


def around_plateaus(route: tuple[str, int], seed: int = 0) -> Iterator[Case]:
    """A heavy value whose copies end just before the k-th place, begin behind it, or lie around it: the sample does not
    know."""
    kernel, cluster = route
    k, n = 600, 5003
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for copies in (250, 400, 1500):
        for better in (k - 40, k - copies - 40, k - copies - 1, k - copies, k - copies // 2, k - 1, k, k + 40):
            row = -torch.rand(n, generator=generator) - 1e-3
            order = torch.randperm(n, generator=generator)
            winners = max(better, 0)
            row[order[:winners]] = torch.rand(winners, generator=generator) + 1e-3
            row[order[winners : winners + copies]] = 0.0
            rows.append(row)
    scores = torch.stack(rows)
    for i, value in enumerate((0.0, -0.0, 0.5, -torch.inf)):  # what the heavy value becomes
        shifted = torch.where(scores == 0, value, scores + (value if value == 0.5 else 0.0))
        margin = (4.0, 0.5, 8.0, 4.0)[i]
        if margin == 8.0:  # an outlier, so that the sample is looked at again though the bracket holds most of it
            shifted[torch.arange(len(rows)), scores.argmax(1)] = 1e6
        call = prepare(shifted, None, k, tie_break=("smallest", "largest")[i % 2])
        about = f"{value} around the k-th place, margin {margin} {kernel}x{cluster} seed {seed}"
        yield Case(about, call, kernel, cluster, margin=margin, options=Options(seed=seed + i))


def wide_brackets(route: tuple[str, int], seed: int = 0) -> Iterator[Case]:
    """A bracket that holds far too much: lists of threads, the spill list and the regions of a cluster overflow.

    In the last rows a few lanes of one warp in four own all candidates.
    """
    kernel, cluster = route
    k, n = 2048, 12000
    scores = torch.cat([distributions.make(d, 1, n, seed=seed, k=k) for d in ("normal", "indexer", "ascending")])
    for margin in (8.0, 20.0, 60.0):
        call = prepare(scores, None, k)
        about = f"margin {margin} {kernel}x{cluster}"
        yield Case(about, call, kernel, cluster, margin=margin, options=Options(seed=seed))
    generator = torch.Generator().manual_seed(seed)
    column = torch.arange(n)
    for lanes in (1, 3, 8, 32):
        row = torch.where(torch.rand(n, generator=generator) < 0.5, 9.0, -9.0) + torch.rand(n, generator=generator)
        owned = (column % 32 < lanes) & (column // 32 % 4 == 1)
        row[owned] = torch.rand(int(owned.sum()), generator=generator)
        # the k-th best lies in the middle of the owned ones
        middle = int((row > 1).sum()) + int(owned.sum()) // 2
        name = f"owned by {lanes} lanes {kernel}x{cluster}"
        yield Case(name, prepare(row[None], None, middle), kernel, cluster, options=Options(seed=seed))


# Rows too wide for a second bitmap where the lists are: no plateau pass, and so no barrier of its own.
NO_PLATEAU = {
    "Row128": 170_000,
    "Row128Deep": 170_000,
    "Row256Light": 327_680,
    "Row256": 327_680,
    "Row512": 600_000,
}


def sampled_columns(kernel: str, n: int) -> torch.Tensor:
    """Where csrc/sample.cuh may look in a row of n scores, whatever its alignment: ``[n]`` bool."""
    pieces = {"Row128": 16, "Row128Deep": 32, "Row256Light": 32, "Row512": 128, "Cluster512Deep": 128}.get(kernel, 64)
    quarter = n // 4 // 16 * 16
    seen = torch.zeros(n + 16, dtype=torch.bool)
    for g in range(pieces):
        h = g * 0x9E3779B1 % 2**32
        h = (h ^ h >> 15) * 0x85EBCA6B % 2**32
        start = (g * (0xFFFFFFFF // pieces) + h // pieces) * (quarter - 15) >> 32
        for q in range(4):  # 16 scores from a multiple of 16 in memory, which lies up to 15 in front of `start`
            seen[max(start - 15, 0) + q * quarter : start + 16 + q * quarter] = True
    return seen[:n]


def between_the_samples(route: tuple[str, int], seed: int = 0) -> Iterator[Case]:
    """All that the sample sees is -inf; the 300 to 700 finite scores lie where it does not look.

    A race: in rows without room for a plateau pass nothing stood between the first thread's note of the sample's ends
    and the others' reading of it.
    """
    kernel, cluster = route
    k, n = 200, NO_PLATEAU.get(kernel, 12_000)
    if seed and n > 200_000:
        return  # seconds each
    free = (~sampled_columns(kernel, n)).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    scores = torch.full((3, n), -torch.inf)
    for row, finite in zip(scores, (300, 500, 700), strict=True):
        places = free[torch.randperm(len(free), generator=generator)[:finite]]
        row[places] = torch.randn(finite, generator=generator)
    call = prepare(scores, None, k, tie_break=("smallest", "largest")[seed % 2])
    about = f"finite scores between the samples, n={n} {kernel}x{cluster} seed {seed}"
    yield Case(about, call, kernel, cluster, options=Options(seed=seed))


def pairs_of_scores(route: tuple[str, int], seed: int = 0) -> Iterator[Case]:
    """16-bit scores, which are loaded, tested and listed two at a time: ties side by side, a value with more copies
    than are ranked all against all, both zeros at the k-th place, lists that overflow."""
    kernel, cluster = route
    n, k = 6003, 1500
    generator = torch.Generator().manual_seed(seed)
    for i, dtype in enumerate((BF16, FP16)):
        normal = torch.randn(3, n, generator=generator)
        twins = normal[:, : (n + 1) // 2].repeat_interleave(2, 1)[:, :n]
        steps = torch.randint(0, 40, (2, n), generator=generator) / 64 + 1  # 150 copies each
        # Denormals of either sign and both zeros, which are as many as hardly fit a bin.
        tiny = torch.randint(0, 90, (4, n), generator=generator, dtype=torch.int32)
        sign = torch.randint(0, 2, (4, n), generator=generator, dtype=torch.int32) * 0x8000
        zeros = (tiny | sign).to(torch.uint16).view(dtype).float()
        groups = {"normal": (normal, k, 4.0), "twins": (twins, k, 4.0), "steps": (steps, k, 8.0)}
        groups["zeros"] = (zeros, int((zeros[0] > 0).sum()) + 40, 4.0)
        groups["lists"] = (normal, k, (20.0, 60.0)[seed % 2])
        for name, (scores, best, margin) in groups.items():
            starts = torch.arange(len(scores)) * 3  # even and odd
            call = prepare(
                scores.to(dtype),
                torch.full((len(scores),), n - 9),
                best,
                row_starts=starts,
                tie_break=("smallest", "largest")[(i + seed) % 2],
            )
            about = f"{name} {dtype} {kernel}x{cluster} seed {seed}"
            yield Case(about, call, kernel, cluster, margin=margin, options=Options(seed=seed + i))


Group = Callable[..., Iterator[Case]]
_GROUPS = (
    by_shape,
    by_layout,
    by_page_size,
    clusters,
    far_rows,
    hostile_integers,
    by_order,
    narrow_brackets,
    wide_brackets,
    around_plateaus,
    crowds,
    between_the_samples,
    pairs_of_scores,
)
GROUPS: dict[str, Group] = {f.__name__: f for f in _GROUPS}


def first_wrong(
    e: Emulated,
    groups: str,
    seeds: int,
    dtypes: tuple[torch.dtype, ...] = (FP32, FP16),
    small_routes: Sequence[tuple[str, int]] = (("Row128", 1), ("Cluster512", 3)),
    known: Mapping[str, Group] = GROUPS,
) -> str | None:
    """The first case of the named groups that is wrong, on kernels of the small build; None when all are right."""
    for seed in range(seeds):
        for name in groups.split():
            for route in small_routes:
                if name == "by_distribution":
                    found = by_distribution(route, dtypes[seed % len(dtypes)], seed)
                elif name == "far_rows":
                    found = far_rows(route)
                else:
                    found = known[name](route, seed)
                for case in found:
                    wrong = case.wrong(e)
                    if wrong is not None:
                        return wrong
    return None
