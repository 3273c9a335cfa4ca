"""The tensors of one case: score buffers to rotate over, lengths, starts and tables, and the public call on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import cases
from .cases import PAGE_SIZE, Case

ROTATED_BYTES = 200 << 20  # a cold rotation covers at least this much, four times the L2 of an H200
MAX_BUFFERS = 128
BIG_BYTES = 400 << 20  # one buffer of this size evicts itself
DISTINCT_ROWS = 64  # rows drawn for a distribution; larger batches repeat them (and windows differ by start and length)
TABLE_SLACK = 8  # page-table entries in front of a packed request's first window

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ScorePool:
    """Device memory for score buffers, kept between cases: filling gigabytes anew would cost more than timing them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[torch.dtype, torch.Tensor] = {}
        self._clean: dict[torch.dtype, bool] = {}

    def buffers(self, case: Case, seed: int = 0) -> tuple[list[torch.Tensor], bool]:
        """Score tensors [rows, columns] for a case, and whether a cold rotation over them still needs an L2 flush."""
        dtype = DTYPES[case.dtype]
        elements = case.rows * case.columns
        step = -(-elements // 64) * 64  # every buffer starts on a 128-byte line
        count = buffer_count(case) if self.device.type == "cuda" else 1
        memory = self._take(dtype, step * count, normal=case.dist == "normal")
        views = [memory[i * step : i * step + elements].view(case.rows, case.columns) for i in range(count)]
        if case.dist != "normal":
            scores = distribution(case, self.device, seed)
            for view in views:  # same values, other addresses: cold is a matter of addresses
                view.copy_(scores)
        return views, case.regime == "cold" and count * case.score_bytes < ROTATED_BYTES and self.device.type == "cuda"

    def dirty(self) -> None:
        """Forget the contents: some peers write into the scores."""
        self._clean.clear()

    def _take(self, dtype: torch.dtype, elements: int, *, normal: bool) -> torch.Tensor:
        if dtype not in self._memory or self._memory[dtype].numel() < elements:
            self._memory.clear()  # one dtype at a time, so that two pools never fill the memory together
            self._clean.clear()
            self._memory[dtype] = torch.empty(elements, dtype=dtype, device=self.device)
        memory = self._memory[dtype]
        if normal and not self._clean.get(dtype):
            generator = torch.Generator(self.device).manual_seed(42)
            for start in range(0, memory.numel(), 1 << 28):
                memory[start : start + (1 << 28)].normal_(generator=generator)
        self._clean[dtype] = normal
        return memory[:elements]


def buffer_count(case: Case) -> int:
    """How many buffers the calls of a case rotate over."""
    if case.regime == "warm":
        return 1
    wanted = max(math.ceil(ROTATED_BYTES / case.score_bytes), 2 if case.score_bytes < BIG_BYTES else 1)
    return min(wanted, MAX_BUFFERS)


def distribution(case: Case, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Scores [rows, columns] of a case's distribution; rows beyond the first 64 repeat them."""
    from ..testing import distributions

    rows, dtype = min(case.rows, DISTINCT_ROWS), DTYPES[case.dtype]
    if case.dist == "recorded":
        scores = _recorded(case.columns, device, dtype)
    elif case.dist == "half_minus_inf":
        generator = torch.Generator(device).manual_seed(seed)
        scores = torch.randn(rows, case.columns, generator=generator, device=device).to(dtype)
        masked = torch.rand(rows, case.columns, generator=generator, device=device) < 0.5
        scores.masked_fill_(masked, -torch.inf)
    else:
        scores = distributions.make(case.dist, rows, case.columns, dtype=dtype, device=device, seed=seed, k=case.k)
    return scores.repeat(math.ceil(case.rows / scores.shape[0]), 1)[: case.rows]


def _recorded(columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Recorded real scores, their rows side by side where one is shorter than the case's columns."""
    from ..testing import recorded

    widest = max(recorded.load().values(), key=lambda t: t.shape[-1])
    rows = widest.reshape(-1, widest.shape[-1]).to(device)
    return rows.repeat(1, math.ceil(columns / rows.shape[1]))[:, :columns].to(dtype)


@dataclass
class Problem:
    """One case on a device: everything that a contestant's call needs except the scores."""

    case: Case
    device: torch.device
    lengths: torch.Tensor  # [R] int32
    out: torch.Tensor  # [R, k] int32, shared by our calls
    row_starts: torch.Tensor | None = None  # [R] int32
    out_offsets: torch.Tensor | None = None  # [R] int32
    page_table: torch.Tensor | None = None  # [B, T] int32, every physical page at most once
    row_to_batch: torch.Tensor | None = None  # [R] int32
    page_table_starts: torch.Tensor | None = None  # [R] int32
    _rows_table: torch.Tensor | None = field(default=None, repr=False)
    _inverse: torch.Tensor | None = field(default=None, repr=False)

    @property
    def form(self) -> str:
        """Form of the public call: ragged or paged."""
        return "ragged" if self.case.mode == "ragged" else "paged"

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the public call (and of the checker) beyond scores, lengths and k."""
        if self.form == "ragged":
            return {"out_offsets": self.out_offsets, "row_starts": self.row_starts}
        return {
            "page_table": self.page_table,
            "page_size": PAGE_SIZE,
            "row_to_batch": self.row_to_batch,
            "row_starts": self.row_starts,
            "page_table_starts": self.page_table_starts,
        }

    def call(self, **extra: Any) -> Callable[[torch.Tensor], object]:
        """Our public call on given scores, outputs preallocated."""
        import dsa_topk

        function: Callable[..., object] = dsa_topk.topk_ragged if self.form == "ragged" else dsa_topk.topk_paged
        lengths, k = self.lengths, self.case.k
        arguments = {"out": self.out, **self.arguments(), **extra}
        return lambda scores: function(scores, lengths, k, **arguments)

    def rows_table(self) -> torch.Tensor:
        """One page-table row per score row [R, T], for peers without ``row_to_batch``."""
        assert self.page_table is not None
        if self.row_to_batch is None:
            return self.page_table
        if self._rows_table is None:
            self._rows_table = self.page_table[self.row_to_batch.long()].contiguous()
        return self._rows_table

    def positions(self, stored: torch.Tensor) -> torch.Tensor | None:
        """Window positions [R, k] of stored paged values: -1 stays -1, anything not in the row's pages becomes -2.

        None for ragged calls, where the checker takes the offsets away itself.
        """
        if self.page_table is None:
            return None
        batches, entries = self.page_table.shape
        if self._inverse is None:
            self._inverse = torch.empty(batches * entries, dtype=torch.int64, device=self.device)
            self._inverse[self.page_table.reshape(-1).long()] = torch.arange(batches * entries, device=self.device)
        token = stored.long()
        page = token.div(PAGE_SIZE, rounding_mode="floor")
        place = self._inverse[page.clamp(0, batches * entries - 1)]
        rows = torch.arange(stored.shape[0], device=self.device)
        batch = (rows if self.row_to_batch is None else self.row_to_batch.long())[:, None]
        first = 0 if self.page_table_starts is None else self.page_table_starts.long()[:, None]
        position = (place % entries - first) * PAGE_SIZE + token % PAGE_SIZE
        known = (page >= 0) & (page < batches * entries) & (place // entries == batch) & (position >= 0)
        return torch.where(token == -1, token, torch.where(known, position, -2)).int()

    def check(self, scores: torch.Tensor, result: torch.Tensor, mode: str, **options: Any) -> str | None:
        """Why an output is wrong; None when it is right. ``mode`` is that of the checker: canonical or set."""
        from ..testing import check_selection

        arguments = {**self.arguments(), **options}
        verdict = check_selection(
            scores,
            self.lengths,
            self.case.k,
            result,
            form=self.form,
            positions=self.positions(result),
            mode=mode,  # type: ignore[arg-type]
            **arguments,
        )
        return None if verdict else verdict.reason


def make(case: Case, device: torch.device | str, *, out: torch.Tensor | None = None) -> Problem:
    """The problem of a case, integer tensors on the device."""
    device = torch.device(device)

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    starts = cases.row_starts(case.mode, case.rows)
    problem = Problem(
        case,
        device,
        lengths=integers(cases.lengths(case.mode, case.rows, case.width)),
        out=torch.empty(case.rows, case.k, dtype=torch.int32, device=device) if out is None else out,
        row_starts=None if starts is None else integers(starts),
    )
    if case.mode == "ragged":
        # Offsets as in an extend over a flat KV buffer: the result is the score's own column.
        problem.out_offsets = problem.row_starts
        return problem
    requests = {"mtp": math.ceil(case.rows / cases.NEXT_N), "packed": min(4, case.rows)}.get(case.mode, case.rows)
    pages = math.ceil(case.width / PAGE_SIZE)
    if case.mode == "packed":
        problem.row_to_batch = integers([i * requests // case.rows for i in range(case.rows)])
        problem.page_table_starts = integers([i % TABLE_SLACK for i in range(case.rows)])
        pages += TABLE_SLACK
    elif case.mode == "mtp":
        problem.row_to_batch = integers([i // cases.NEXT_N for i in range(case.rows)])
    generator = torch.Generator(device).manual_seed(5)
    scattered = torch.randperm(requests * pages, generator=generator, device=device, dtype=torch.int64)
    problem.page_table = scattered.int().view(requests, pages)
    return problem
