"""Named call shapes: the batches that engines hand to a DSA top-k, without the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from .checker import Mode, check_selection
from .verdict import Verdict

_TENSORS = ("lengths", "row_starts", "out_offsets", "page_table", "row_to_batch", "page_table_starts")
_BY_FORM: dict[str, tuple[str, ...]] = {
    "positions": ("row_starts",),
    "ragged": ("out_offsets", "row_starts"),
    "paged": ("page_table", "page_size", "row_to_batch", "row_starts", "page_table_starts"),
}


@dataclass(slots=True)
class CallShape:
    """Everything of a call but its scores ``[rows, width]``; the tensors are as in the public functions."""

    name: str
    form: str
    rows: int
    width: int
    k: int
    lengths: torch.Tensor | None = None
    row_starts: torch.Tensor | None = None
    out_offsets: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    page_size: int = 1
    row_to_batch: torch.Tensor | None = None
    page_table_starts: torch.Tensor | None = None
    about: str = field(default="", compare=False)

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the matching public function, beside ``scores``, ``lengths`` and ``k``."""
        return {name: getattr(self, name) for name in _BY_FORM[self.form]}

    def call(self, scores: torch.Tensor, **extra: Any) -> Any:
        """Call ``topk_positions``, ``topk_ragged`` or ``topk_paged`` on ``scores``; ``extra`` goes along."""
        import dsa_topk

        function = getattr(dsa_topk, f"topk_{self.form}")
        return function(scores, self.lengths, self.k, **self.kwargs(), **extra)

    def check(
        self,
        scores: torch.Tensor,
        result: torch.Tensor,
        *,
        order: str = "position",
        tie_break: str = "smallest",
        positions: torch.Tensor | None = None,
        returned_scores: torch.Tensor | None = None,
        mode: Mode = "canonical",
    ) -> Verdict:
        """Check an output of this call; see :func:`dsa_topk.testing.check_selection`."""
        return check_selection(
            scores,
            self.lengths,
            self.k,
            result,
            form=self.form,
            **self.kwargs(),
            order=order,
            tie_break=tie_break,
            positions=positions,
            returned_scores=returned_scores,
            mode=mode,
        )

    def to(self, device: torch.device | str) -> CallShape:
        """The same shape with its tensors on ``device``."""
        copy = CallShape(**{entry.name: getattr(self, entry.name) for entry in fields(self)})
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(copy, name, tensor.to(device))
        return copy


@dataclass(frozen=True, slots=True)
class _Plan:
    """What :func:`make` was asked for, and the random numbers for it (drawn on the CPU: the same on every device)."""

    rows: int
    width: int
    k: int
    page_size: int
    generator: torch.Generator

    def integers(self, low: int, high: int, *size: int) -> torch.Tensor:
        """int64 of ``size``, ``low <= x <= high``."""
        return torch.randint(low, max(low, high) + 1, size, generator=self.generator)

    def lengths(self, count: int, top: int) -> torch.Tensor:
        """``count`` lengths from 1 to ``top``, uniform in their logarithm."""
        draw = torch.rand(count, generator=self.generator)
        return (torch.exp2(draw * torch.log2(torch.tensor(float(max(top, 1))))).long()).clamp(1, max(top, 1))

    def tables(self, batches: int, tokens: torch.Tensor, entries: int) -> torch.Tensor:
        """int32 [batches, entries]: shuffled distinct pages in the used part, garbage behind it."""
        used = (tokens.clamp(min=0) + self.page_size - 1) // self.page_size
        pages = torch.randperm(max(1, batches * entries), generator=self.generator)[: batches * entries]
        pages = pages % max(1, (2**31 - 1) // self.page_size)  # stored values stay within int32
        pages = pages.view(batches, entries)
        return torch.where(torch.arange(entries) < used[:, None], pages, 0x7EADBEEF).to(torch.int32)


def _odd(starts: torch.Tensor, width: int) -> torch.Tensor:
    """Move starts off multiples of 4 where there is room: real prefixes end anywhere."""
    turn = torch.arange(starts.numel()) % 4
    return (starts - starts % 4 + turn).clamp(max=max(width - 1, 0))


def _packed_requests(plan: _Plan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Requests packed along the score axis: request of each row, first column and number of keys of each request."""
    requests = max(1, min(4, plan.rows, plan.width // 8))
    cuts = torch.arange(requests + 1) * plan.width // requests
    base = _odd(cuts[:-1], plan.width)
    base[0] = 0
    keys = torch.cat([base[1:], torch.tensor([plan.width])]) - base
    owner = torch.arange(plan.rows) * requests // plan.rows if plan.rows else torch.arange(0)
    return owner, base, keys


def _causal(owner: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Causal lengths of the last rows of each request: its last row sees all keys."""
    after = torch.bincount(owner, minlength=keys.numel()).cumsum(0)[owner] - 1 - torch.arange(owner.numel())
    return (keys[owner] - after).clamp(min=0)


def _decode(plan: _Plan) -> dict[str, Any]:
    lengths = plan.lengths(plan.rows, plan.width)
    entries = -(-plan.width // plan.page_size)
    return {"form": "paged", "lengths": lengths, "page_table": plan.tables(plan.rows, lengths, entries)}


def _mtp(plan: _Plan) -> dict[str, Any]:
    next_n = 4
    requests = -(-plan.rows // next_n)
    owner = torch.arange(plan.rows) // next_n
    base = plan.lengths(requests, plan.width - next_n + 1)
    lengths = (base[owner] + torch.arange(plan.rows) % next_n).clamp(max=plan.width)
    entries = -(-plan.width // plan.page_size)
    table = plan.tables(requests, (base + next_n).clamp(max=plan.width), entries)
    return {"form": "paged", "lengths": lengths, "row_to_batch": owner, "page_table": table}


def _ragged(plan: _Plan) -> dict[str, Any]:
    owner, base, keys = _packed_requests(plan)
    return {
        "form": "ragged",
        "lengths": _causal(owner, keys),
        "row_starts": base[owner],
        "out_offsets": base[owner],  # the selected position becomes the column of the flattened KV
    }


def _packed(plan: _Plan) -> dict[str, Any]:
    owner, base, keys = _packed_requests(plan)
    entries = -(-int(keys.max()) // plan.page_size)
    return {
        "form": "paged",
        "lengths": _causal(owner, keys),
        "row_starts": base[owner],
        "row_to_batch": owner,
        "page_table": plan.tables(keys.numel(), keys, entries),
    }


def _chunked(plan: _Plan) -> dict[str, Any]:
    """A later chunk of a longer extend: prefixes are already cached, tables belong to the whole batch of requests."""
    owner, base, keys = _packed_requests(plan)
    skip = 3  # requests of the batch that other chunks serve
    first = plan.integers(0, 2, keys.numel())  # entries of the table before the window
    entries = -(-int(keys.max()) // plan.page_size) + 2
    tokens = torch.cat([plan.integers(0, plan.width, skip), keys + first * plan.page_size])
    return {
        "form": "paged",
        "lengths": _causal(owner, keys),
        "row_starts": base[owner],
        "row_to_batch": owner + skip,
        "page_table": plan.tables(keys.numel() + skip, tokens, entries),
        "page_table_starts": first[owner],
    }


def _prefill_cp(plan: _Plan) -> dict[str, Any]:
    """One rank of a zigzag split: an early and a late block of one sequence, padded with empty rows at the end."""
    padding = min(3, plan.rows // 4)
    live = plan.rows - padding
    early = live // 2
    start = min(5, plan.width)
    keys = plan.width - start
    low = keys // 4 + torch.arange(early) - early
    high = keys + torch.arange(live - early) - (live - early) + 1
    lengths = torch.cat([low, high, torch.zeros(padding, dtype=torch.int64)]).clamp(0, keys)
    starts = torch.full((plan.rows,), start, dtype=torch.int64)
    # Offsets count from the queries of this rank, not from the KV base.
    return {"form": "ragged", "lengths": lengths, "row_starts": starts, "out_offsets": torch.arange(plan.rows) * 17 + 3}


def _mixed(plan: _Plan) -> dict[str, Any]:
    lengths = plan.lengths(plan.rows, plan.width)
    edges = torch.tensor([0, 1, plan.k - 1, plan.k, plan.k + 1, plan.width])
    lengths[::2] = edges.repeat(-(-plan.rows // 6))[: lengths[::2].numel()]
    lengths = lengths.clamp(max=plan.width)
    room = plan.width - lengths
    starts = torch.minimum(room, plan.integers(0, 31, plan.rows))
    return {"form": "positions", "lengths": lengths, "row_starts": starts}


def _dp_padding(plan: _Plan) -> dict[str, Any]:
    """Decode of an idle data-parallel rank: the padding rows have length 1 less the draft tokens, so -4 to 1."""
    real = plan.rows // 2
    lengths = torch.cat([plan.lengths(real, plan.width), torch.arange(plan.rows - real) % 6 - 4])
    lengths = lengths.clamp(max=plan.width)
    entries = -(-plan.width // plan.page_size)
    owner = torch.arange(plan.rows).clamp(max=max(real - 1, 0))
    table = plan.tables(max(real, 1), lengths[: max(real, 1)].clamp(min=plan.page_size), entries)
    return {"form": "paged", "lengths": lengths, "row_to_batch": owner, "page_table": table}


_BUILDERS: dict[str, tuple[str, Callable[[_Plan], dict[str, Any]]]] = {
    "decode": ("paged, one row per request, lengths from 1 to the width", _decode),
    "mtp": ("paged, four draft rows per request, growing by one", _mtp),
    "ragged": ("ragged extend: requests packed along the score axis, causal lengths", _ragged),
    "packed": ("paged extend: batch-global score starts, per-request tables", _packed),
    "chunked": ("a chunk of a packed extend: later table rows, windows that start inside the table", _chunked),
    "prefill_cp": ("ragged, zigzag blocks of one rank, offsets unlike starts, empty rows at the end", _prefill_cp),
    "mixed": ("positions, lengths 0, 1, around k and the width mixed with random ones", _mixed),
    "dp_padding": ("paged, half the rows are padding with lengths from -4 to 1", _dp_padding),
}

NAMES: tuple[str, ...] = tuple(_BUILDERS)


def make(
    name: str,
    *,
    rows: int,
    width: int,
    k: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
    index_dtype: torch.dtype = torch.int32,
    page_size: int = 64,
) -> CallShape:
    """A named call shape.

    Parameters
    ----------
    name : str
        One of :data:`NAMES`.
    rows, width : int
        Shape of the scores.
    k : int
        How many to select.
    device : torch.device or str
        Where the tensors go; the numbers are the same on every device.
    seed : int
        Same arguments, same shape.
    index_dtype : torch.dtype
        int32 or int64, for all 1-D integer tensors.
    page_size : int
        Tokens per page (paged forms).

    Returns
    -------
    CallShape
    """
    if name not in _BUILDERS:
        raise ValueError(f"name: expected one of {', '.join(NAMES)}, got {name!r}")
    about, builder = _BUILDERS[name]
    plan = _Plan(rows, width, k, page_size, torch.Generator().manual_seed(seed))
    built = builder(plan)
    for key in _TENSORS:
        if key in built:
            built[key] = built[key].to(device=device, dtype=torch.int32 if key == "page_table" else index_dtype)
    return CallShape(name=name, rows=rows, width=width, k=k, page_size=page_size, about=about, **built)
