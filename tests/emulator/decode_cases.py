"""Calls that reach every corner of the decode kernels: held rows (csrc/resident.cuh) and split rows (csrc/split.cuh).

Which threads own which scores, what the split kernel samples and where its slices begin is worked out here once more,
so that a row can be laid out against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from dsa_topk.testing import distributions

from .args import held
from .cases import FP16, FP32, Case
from .emulated import prepare
from .process import Options

Route = tuple[str, int]

CAPACITY = {name: threads * each for name, (threads, each, _) in held().items()}
QUADS = {"Split512": 2, "Spread512": 4}  # groups of four that a thread samples of a row of LONG_ROW scores; else one
LONG_ROW = 98304
BATCH = {"Split512": 512 * 16, "Spread512": 512 * 16, "Whole512": 512 * 16, "Whole1024": 1024 * 16}
DECODE_ROUTES: tuple[Route, ...] = (
    *((kernel, 1) for kernel in CAPACITY),
    ("Whole512", 1),
    ("Whole1024", 1),
    *(("Split512", blocks) for blocks in (2, 3, 5, 16)),
    *(("Spread512", blocks) for blocks in (2, 7)),
)
SMALL_ROUTES: tuple[Route, ...] = (("Held8K", 1), ("Split512", 3))  # the decode kernels of the small build


def cases_of(
    route: Route, about: str, scores: torch.Tensor, k: int, seed: int, *, lengths: torch.Tensor | None = None
) -> Iterator[Case]:
    """The same rows under both tie rules."""
    kernel, blocks = route
    for tie_break in ("smallest", "largest"):
        call = prepare(scores, lengths, k, tie_break=tie_break)
        name = f"{about} k={k} {tie_break} {kernel}x{blocks} seed {seed}"
        yield Case(name, call, kernel, blocks, options=Options(seed=seed))


def threads_of(kernel: str) -> int:
    """Threads of a decode kernel's block (csrc/launch.h)."""
    return held()[kernel][0] if kernel in CAPACITY else 1024 if kernel == "Whole1024" else 512


def owned_columns(kernel: str, group: torch.Tensor) -> torch.Tensor:
    """First column of group ``group[t]`` of each thread of a held row (csrc/held.cuh)."""
    threads = threads_of(kernel)
    groups = CAPACITY[kernel] // threads // 4
    thread = torch.arange(threads)
    return (thread // 32 * groups + group % groups) * 128 + thread % 32 * 4


def sampled_columns(kernel: str, n: int) -> torch.Tensor:
    """``[n]`` bool: what a split kernel samples of a row of n scores that is aligned (csrc/bracket.cuh)."""
    parts = threads_of(kernel) // 4 * (QUADS.get(kernel, 1) if n >= LONG_ROW else 1)
    part = torch.arange(parts)
    span = 0xFFFFFFFF // parts
    h = part * 0x9E3779B1 % 2**32
    h = (h ^ h >> 15) * 0x85EBCA6B % 2**32
    group = (part * span + (h * span >> 32)) * (n // 4 - 3) >> 32
    seen = torch.zeros(n, dtype=torch.bool)
    seen[(group[:, None] // 4 * 16 + torch.arange(16)).flatten()] = True
    return seen


def at_the_capacity(route: Route, seed: int = 0) -> Iterator[Case]:
    """Rows of exactly what a block holds, one less and one more, from every misalignment of their start."""
    kernel, _ = route
    if kernel not in CAPACITY:
        return
    full = CAPACITY[kernel]
    line = distributions.make("quantised", 1, full + 16, seed=seed, k=2048)[0]
    for shift in range(4):
        dtype = (FP32, FP16)[(shift + seed) % 2]
        storage = line.to(dtype)
        scores = storage[shift:].as_strided((3, full + 2), (4, 1), shift)  # the rows overlap
        lengths = torch.tensor([full - shift, full - shift - 1, full - shift + 1])  # fits; fits; one too many
        yield from cases_of(
            route, f"n={full} shift {shift} {dtype}", scores, (2048, 513)[shift % 2], seed, lengths=lengths
        )


def several_batches(route: Route, seed: int = 0) -> Iterator[Case]:
    """Slices of two batches and more, the last one whole, one score long or one short of whole."""
    kernel, blocks = route
    if kernel not in BATCH:
        return
    batch = BATCH[kernel] * blocks
    rows = 4 if blocks < 4 else 2
    n = 2 * batch + 4 * blocks * 32
    lengths = torch.tensor([2 * batch, 2 * batch + 1, n, batch + 1])[:rows]
    names = ("normal", "indexer", "quantised", "normal")
    scores = torch.cat([distributions.make(name, 1, n, seed=seed, k=2048) for name in names[:rows]])
    yield next(cases_of(route, f"n={n}", scores, 2048, seed, lengths=lengths))


def short_slices(route: Route, seed: int = 0) -> Iterator[Case]:
    """Rows so short that blocks have no slice, and lengths around the places where slices end."""
    kernel, blocks = route
    if kernel in CAPACITY:
        return
    ends = [4 * 32 * blocks * m + d for m in (1, 2) for d in (-1, 0, 1, 4, 4 * blocks, 4 * blocks + 1)]
    lengths = torch.tensor([m for m in (256, 257, 300, 384, 385, 511, 513, *ends) if m >= 256])
    if blocks > 3:
        lengths = lengths[seed % 3 :: 3]
    n = int(lengths.max()) + 1  # a stride that moves every row's start
    n += 1 - n % 2
    # the best are at the end, so that what a slice lacks is missed
    scores = distributions.make("normal", len(lengths), n, seed=seed, k=65) + torch.arange(n) / 50
    for k in (1, 65, 200) if blocks <= 5 else (65,):
        yield next(cases_of(route, f"slices n<={n}", scores, k, seed + k, lengths=lengths))


def one_slice(route: Route, seed: int = 0) -> Iterator[Case]:
    """All of the best in one slice: regions and a block's list overflow, and nothing is lost."""
    kernel, blocks = route
    if kernel in CAPACITY:
        return
    n = 16384 if blocks < 16 else 12000
    line = distributions.make("ascending", 1, n, seed=seed)
    scores = torch.cat([line, line.flip(1), line.roll(n // 3, 1)])
    for k in (500, 2048, 5000):  # of a block's list: some, about what it sends, more than it holds
        yield next(cases_of(route, f"sorted n={n}", scores, k, seed))
    yield next(cases_of(route, f"sorted n={n}", scores[:1], 8192, seed))


def wide_lists(route: Route, seed: int = 0) -> Iterator[Case]:
    """A bracket so wide that a list overflows in a later batch, while without that batch the row would still have k
    scores: only the overflow tells. And nearly all of a long row in the bracket: many times what a list holds."""
    kernel, blocks = route
    if kernel not in BATCH or blocks > 3:
        return
    generator = torch.Generator().manual_seed(seed)
    n, k = 2 * BATCH[kernel] * blocks, 1000
    row = torch.rand(n, generator=generator)
    row[: n // blocks] = 1 - (1 - row[: n // blocks]) * (0.63 if blocks > 1 else 1.0)  # more of the best in block 0
    # 5000 in block 0, which sends 4096; or in one, which holds 10240
    listed = 10_300 * blocks / 3 if blocks > 1 else 12_000
    samples = 4 * threads_of(kernel)
    share = k / n
    margin = (listed / n - share) * samples / (samples * share * (1 - share)) ** 0.5
    for case in cases_of(route, f"margin {margin:.0f} n={n}", row[None], k, seed):
        case.margin = margin
        yield case
    n = 80_000
    low = torch.rand(n, generator=generator) - 10.0 * sampled_columns(kernel, n)
    yield next(cases_of(route, f"all listed n={n}", low[None], 2048, seed))


def of_one_bin(route: Route, seed: int = 0) -> Iterator[Case]:
    """1 to 129 copies of the k-th score, of which the first, all but one or all are taken: the ranked list in every
    length, and one more than it holds."""
    blocks = route[1]
    n, k = 3001, 300
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for copies in (1, 2, 31, 33, 64, 100, 127, 128, 129):
        for taken in {1, copies - 1, copies} - {0}:
            row = torch.rand(n, generator=generator)  # far below; the winners lie far above
            order = torch.randperm(n, generator=generator)
            row[order[: k - taken]] += 20
            row[order[k - taken : k - taken + copies]] = 10.0
            rows.append(row)
    scores = torch.stack(rows)
    if blocks > 5:
        scores = scores[[4 + seed % 5, -1 - seed % 7]]
    yield from cases_of(route, "copies", scores[seed % 2 :: 2] if 2 < blocks <= 5 else scores, k, seed)


def plateaus(route: Route, seed: int = 0) -> Iterator[Case]:
    """One value or two all over the row: rounds by key and, for equal scores, by position, which end at every place of
    a step of eight."""
    blocks = route[1]
    n = 2048
    equal = torch.full((1, n), 0.5)
    two = torch.where(torch.arange(n) % 3 == 0, 2.0, -2.0)[None]
    near = (torch.arange(n) % 700 + 0x3F800000).to(torch.int32).view(FP32)[None]  # 700 neighbouring numbers
    wide = torch.where(torch.arange(n) % 2 == 0, 1e30, -3e38)[None]
    zeros = torch.where(torch.arange(n) % 2 == 0, 0.0, -0.0)[None]
    infinite = torch.where(torch.arange(n) % 5 == 0, torch.inf, -torch.inf)[None]
    rows = torch.cat([equal, two, near, wide, zeros, infinite])
    turns = (1, 7, 8, 9, 682, 683, 684, 1000, 2041, n - 1)
    for i, k in enumerate(turns if blocks == 1 else turns[seed % 3 :: 3] if blocks <= 5 else turns[seed % 10 :][:1]):
        cases = list(cases_of(route, "plateaus", rows, k, seed + i, lengths=torch.tensor([n, n - 1, n, n, n - 3, n])))
        yield from cases if blocks == 1 else cases[i % 2 : i % 2 + 1]


def misleading_maxima(route: Route, seed: int = 0) -> Iterator[Case]:
    """A winner for every thread (half of a thread's scores): the bound from their maxima lies above the k-th score."""
    kernel, _ = route
    if kernel not in CAPACITY:
        return
    full = CAPACITY[kernel]
    generator = torch.Generator().manual_seed(seed)
    threads = threads_of(kernel)
    groups = full // threads // 4
    for k, halves in ((threads + 88, 1), (full // 4, 2)):
        low = torch.rand(full, generator=generator)
        for half in range(halves):
            group = torch.randint(groups // halves, (threads,), generator=generator) + half * (groups // halves)
            columns = owned_columns(kernel, group) + torch.randint(4, (threads,), generator=generator)
            low[columns] = 10 + torch.rand(threads, generator=generator)
        rest = low < 5
        rows = [low, torch.where(rest, 0.25, low), torch.where(rest, -torch.inf, low), low.clone(), low.clone()]
        rows[3][rest] = torch.nan  # fewer than k scores
        rows[4][rest.nonzero()[: full // 2, 0]] = torch.nan
        yield from cases_of(route, f"a winner in each of {threads * halves} groups", torch.stack(rows), k, seed)
    # The last bin holds 100 NaNs and nothing else; some of them are among the k best.
    few = torch.randn(full, generator=generator)
    few[torch.randperm(full, generator=generator)[:100]] = torch.nan
    yield from cases_of(route, "100 NaNs", few[None], full - 50, seed)


def misleading_samples(route: Route, seed: int = 0) -> Iterator[Case]:
    """What is sampled is unlike the rest: the bracket lies above the k-th score, or below nearly everything."""
    kernel, _ = route
    if kernel not in BATCH:
        return
    generator = torch.Generator().manual_seed(seed)
    for n, k in ((12_000, 2048), (6000, 1024)):
        seen = sampled_columns(kernel, n)
        noise = torch.rand(2, n, generator=generator)
        high, low = noise[0] + 10.0 * seen, noise[1] - 10.0 * seen
        flat = torch.where(seen, 0.5, noise[0])
        yield next(cases_of(route, f"misleading samples n={n}", torch.stack([high, low, flat]), k, seed))
    # The k-th score lies above the bracket, with few scores around it: they all count in the first bin.
    n = 12_000
    free = (~sampled_columns(kernel, n)).nonzero()[:, 0]
    row = torch.rand(n, generator=generator)
    row[free[torch.randperm(len(free), generator=generator)[:110]]] += 50.0
    yield from cases_of(route, "k-th score above the bracket", row[None], 100, seed)


def decode_tables(route: Route, seed: int = 0) -> Iterator[Case]:
    """Calls as decoding makes them: int32 lengths and nothing else, tables wider and narrower than the scores, pages of
    every size across the slices' ends, more of them than are staged."""
    kernel, blocks = route
    generator = torch.Generator().manual_seed(seed)
    n, k = (4000, 300) if kernel in CAPACITY or blocks > 5 else (9000, 1000)
    rows = 3
    aligned = distributions.make("indexer", rows, n, seed=seed, k=k)
    misaligned = torch.cat([aligned, aligned[:, :1]], 1)[:, 1:]  # row i by i + 1 scores
    turns = ((64, 0), (1, 0), (4, 3), (10, 2), (48, -1), (100, -7), (16384, 0))
    for i, (page_size, more) in enumerate(turns if blocks < 5 else turns[seed % 2 :: 2]):
        entries = max(-(-n // page_size) + more, 1)
        table = torch.randperm(rows * entries, generator=generator, dtype=torch.int32).view(rows, entries)
        pad = torch.empty(2 * rows, dtype=torch.int32)
        pad[::2] = torch.tensor([n, n - 1001, -5 if i % 2 else n + 9])
        call = prepare(
            misaligned if (i + seed) % 2 else aligned,
            pad[::2],
            k,
            form="paged",
            page_table=table,
            page_size=page_size,
            positions=i % 3 == 1,
            return_scores=i % 3 == 2,
            tie_break=("smallest", "largest")[i % 2],
        )
        about = f"table of {entries} pages of {page_size} {kernel}x{blocks} seed {seed}"
        yield Case(about, call, kernel, blocks, options=Options(seed=seed + i, pdl=i % 2 == 1))
    # ragged, and outputs that lie nowhere in particular
    offsets = torch.tensor([5, -(2**31), 2**31 - 3], dtype=torch.int64)
    out = torch.empty(rows, k + 7, dtype=torch.int32)
    call = prepare(misaligned, torch.full((rows,), n, dtype=torch.int32), k, form="ragged", out_offsets=offsets)
    call.out = out[:, 3 : 3 + k]
    yield Case(f"ragged {kernel}x{blocks} seed {seed}", call, kernel, blocks, options=Options(seed=seed, pdl=True))


def drafts(route: Route, seed: int = 0) -> Iterator[Case]:
    """MTP: the rows of a request differ by their lengths only; those of padding are negative."""
    kernel, blocks = route
    n, k = 2500, 512
    scores = distributions.make("half_zeros", 2, n, seed=seed, k=k).repeat_interleave(4, 0)
    lengths = torch.tensor([n - 3, n - 2, n - 1, n, k - 1, k, k + 1, -2], dtype=torch.int32)
    table = torch.randperm(2 * 40, dtype=torch.int32, generator=torch.Generator().manual_seed(seed)).view(2, 40)
    owner = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.int32)
    call = prepare(scores, lengths, k, form="paged", page_table=table, page_size=64, row_to_batch=owner)
    yield Case(f"drafts {kernel}x{blocks} seed {seed}", call, kernel, blocks, options=Options(seed=seed, pdl=True))


SHORT_WINDOW, SHORT_K = 3072, 2048
SAMPLED_ROUTES: tuple[Route, ...] = (
    *(("Split512", blocks) for blocks in (2, 5, 16)),
    ("Whole512", 1),
    ("Spread512", 3),
)


def beyond(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The scores with what lies behind each row's end turned into what would win, or be no number, if it counted."""
    column = torch.arange(scores.shape[1], device=scores.device)
    garbage = torch.where(column % 3 == 0, torch.nan, torch.inf).to(scores.dtype)
    return torch.where(column < lengths[:, None], scores, garbage)


def short_windows(
    route: Route, seed: int = 0, dtype: torch.dtype = FP32, name: str = "normal", tie_break: str = "smallest"
) -> Iterator[Case]:
    """Windows hardly longer than k in a wide buffer: a sample that is nearly all wanted, of a row whose length the
    first loads do not know."""
    kernel, blocks = route
    if kernel in CAPACITY:
        return
    k, width = SHORT_K, 20_000
    lengths = torch.tensor([*range(k + 1, k + 81, 7), k + 80, *range(k + 140, SHORT_WINDOW, 150), SHORT_WINDOW])
    if blocks > 5:
        lengths = lengths[seed % 4 :: 4]
    scores = distributions.make(name, len(lengths), width, dtype=dtype, seed=seed, k=k)
    call = prepare(beyond(scores, lengths), lengths.to(torch.int32), k, tie_break=tie_break)
    about = f"short windows {name} {dtype} {tie_break} {kernel}x{blocks} seed {seed}"
    fast = 0 if name == "quantised" else round(0.9 * len(lengths))  # a sample that is all wanted may miss the k-th
    yield Case(about, call, kernel, blocks, margin=4.5, options=Options(seed=seed), least_fast=fast)


SHARES = (0.999, 0.99, 0.8, 0.76, 0.74, 0.3)


def shares_of_the_buffer(
    route: Route, seed: int = 0, dtype: torch.dtype = FP32, width: int = 12_000, k: int = 1000
) -> Iterator[Case]:
    """Rows as long as some share of their buffer, from which some kernels sample before they know the length: what lies
    behind a row's end must not mislead them."""
    kernel, blocks = route
    if kernel in CAPACITY:
        return
    lengths = (torch.tensor(SHARES, dtype=torch.float64) * width).to(torch.int32)
    if blocks > 5:
        lengths = lengths[seed % 2 :: 2]
    count = len(lengths)
    scores = beyond(distributions.make("normal", count, width, dtype=dtype, seed=seed, k=k), lengths)
    for shift in (0, 3) if width < LONG_ROW and blocks <= 5 else (0,):
        storage = torch.empty(count * width + 4, dtype=dtype)
        rows = storage[shift : shift + count * width].view(count, width)  # garbage behind a row and before the next one
        rows.copy_(scores)
        call = prepare(rows, lengths, k, tie_break=("smallest", "largest")[(seed + shift) % 2])
        about = f"shares of {width} shift {shift} {dtype} {kernel}x{blocks} seed {seed}"
        yield Case(about, call, kernel, blocks, margin=4.5, options=Options(seed=seed + shift), least_fast=count)


# Lengths that leave next to none of the four scores a turn that a thread looks at empty (split.cuh, visit).
FULL_TURNS = {"Split512": {2: 2048, 3: 11_450}, "Whole512": {1: 2040}, "Whole1024": {1: 4090}, "Spread512": {2: 2040}}


def below_the_sample(route: Route, seed: int = 0) -> Iterator[Case]:
    """Nearly all of a row is wanted, and the k-th score lies below all that is sampled, first or second of 20."""
    kernel, blocks = route
    n = FULL_TURNS.get(kernel, {}).get(blocks, 0)
    if n == 0:
        return
    generator = torch.Generator().manual_seed(seed)
    free = (~sampled_columns(kernel, n)).nonzero()[:, 0]
    rows = torch.rand(4, n, generator=generator)
    for row in rows:
        row[free[torch.randperm(len(free), generator=generator)[:20]]] -= 5.0
    for k in (n - 19, n - 18):
        yield from cases_of(route, f"k-th score below the sample n={n}", rows, k, seed)


def long_held(route: Route, seed: int = 0, dtype: torch.dtype = FP32) -> Iterator[Case]:
    """The longest rows that are held, and the shortest that only Held32K holds: misaligned by as much as fits, with
    garbage behind them, and with so many copies of the k-th score that the row goes the other way."""
    kernel, _ = route
    if kernel != "Held32K":
        return
    k, full = 2048, CAPACITY[kernel]
    generator = torch.Generator().manual_seed(seed)
    for i, (n, shift) in enumerate(((16385, 1), (full - 2, 2), (full, 0), (20_003, 3))):
        storage = torch.full((3 * (full + 4),), torch.inf, dtype=dtype)
        rows = storage.as_strided((3, n), (full + 4, 1), shift)
        rows.copy_(distributions.make("normal", 3, n, dtype=dtype, seed=seed + i, k=k))
        order = torch.randperm(n, generator=generator)
        rows[1, order[: k - 50]] = 7.0 + torch.rand(k - 50, generator=generator).to(dtype)
        rows[1, order[k - 50 : k + 50]] = 6.5  # 100 copies, 50 of which are taken
        rows[2, order[: k - 100]] = 7.0
        rows[2, order[k - 100 : k + 100]] = 6.5  # 200: more than are ranked
        lengths = torch.full((3,), n, dtype=torch.int32)
        wide = storage.as_strided((3, full), (full + 4, 1), shift) if shift == 0 else rows  # loaded before n is known
        call = prepare(wide, lengths, k, tie_break=("smallest", "largest")[(seed + i) % 2])
        about = f"held n={n} shift {shift} {dtype} seed {seed}"
        yield Case(about, call, kernel, options=Options(seed=seed + i), least_fast=2)


Group = Callable[..., Iterator[Case]]
_GROUPS: tuple[Group, ...] = (
    at_the_capacity,
    several_batches,
    short_slices,
    one_slice,
    wide_lists,
    of_one_bin,
    plateaus,
    misleading_maxima,
    misleading_samples,
    decode_tables,
    drafts,
    short_windows,
    shares_of_the_buffer,
    below_the_sample,
    long_held,
)
DECODE_GROUPS: dict[str, Group] = {f.__name__: f for f in _GROUPS}
