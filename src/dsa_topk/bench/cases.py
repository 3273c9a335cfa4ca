"""What is timed: cases (one per result row), the windows that each mode gives its rows, and the named suites."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

MODES = ("ragged", "packed", "decode", "mtp", "mixed")
REGIMES = ("cold", "warm")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PAGE_SIZE = 64
NEXT_N = 4  # rows of one request in mode mtp
# Columns beyond the longest window of ragged and packed scores: room for the row starts, in whole 128-byte lines.
RAGGED_MARGIN = 320
WARM_BYTES = 40 << 20  # scores that stay in an H200's L2 (50 MB) between two calls


@dataclass(frozen=True, order=True)
class Case:
    """One timed cell: the identity of one row of the result file."""

    mode: str
    rows: int
    width: int  # nominal window (ragged, packed) or longest length (decode, mtp, mixed)
    k: int = 2048
    dtype: str = "float32"
    dist: str = "normal"
    regime: str = "cold"

    def label(self) -> str:
        """The cell in a few words, for progress lines and error texts."""
        return f"{self.mode} {self.rows} x {self.width} k={self.k} {self.dtype} {self.dist} {self.regime}"

    @property
    def columns(self) -> int:
        """Columns of the score tensor."""
        return self.width + RAGGED_MARGIN if self.mode in ("ragged", "packed") else self.width

    @property
    def score_bytes(self) -> int:
        """Bytes of one score tensor."""
        return self.rows * self.columns * ELEMENT_BYTES[self.dtype]

    @property
    def window_bytes(self) -> int:
        """Bytes of all windows: what any exact selection has to read, and what the floor reads."""
        return sum(lengths(self.mode, self.rows, self.width)) * ELEMENT_BYTES[self.dtype]

    @property
    def geometry(self) -> tuple[str, int, int, str, str]:
        """What the floor depends on: equal for cells that differ by k, distribution or page table only."""
        mode = "ragged" if self.mode == "packed" else self.mode
        return (mode, self.rows, self.width, self.dtype, self.regime)


def lengths(mode: str, rows: int, width: int) -> list[int]:
    """Window length of each row.

    ragged, packed: linear from half to full. decode: all full. mtp: the rows of a request see one position more each.
    mixed: log-uniform in 1 .. width from a fixed seed, one row full.
    """
    if mode in ("ragged", "packed"):
        half = width // 2
        return [half + i * (width - half) // max(rows - 1, 1) for i in range(rows)]
    if mode == "mtp":
        return [max(width - (NEXT_N - 1 - i % NEXT_N), 0) for i in range(rows)]
    if mode == "mixed":
        source = random.Random(3)
        drawn = [min(max(int(math.exp(source.random() * math.log(width))), 1), width) for _ in range(rows)]
        return [width, *drawn[1:]]
    return [width] * rows


def row_starts(mode: str, rows: int) -> list[int] | None:
    """First column of each row's window: ragged and packed windows never start at a multiple of 4 columns."""
    if mode not in ("ragged", "packed"):
        return None
    return [4 * (i * 37 % 64) + 1 + i % 3 for i in range(rows)]


def _both(cases: Iterable[Case], *, warm_all: bool = False) -> list[Case]:
    """Cold and warm; warm only where the scores can stay in L2, unless asked for all."""
    out: list[Case] = []
    for case in cases:
        out.append(case)
        if warm_all or case.score_bytes <= WARM_BYTES:
            out.append(replace(case, regime="warm"))
    return out


PREFILL_WINDOWS = (8192, 16384, 32768, 65536, 131072)
PREFILL_SHAPES = [(r, w) for r in (1024, 4096, 8192) for w in PREFILL_WINDOWS if (r, w) != (8192, 131072)]
DECODE_SHAPES = [
    *((b, w) for w in (4096, 8192, 16384, 32768, 65536, 131072, 262144) for b in (1, 4, 16, 32, 64, 128, 256)),
    (1, 1048576),
    (8, 1048576),
]
# Distributions whose cost may differ from the normal one (the benchmark's names are those of dsa_topk.testing).
DISTS = (
    "normal",
    "indexer",
    "narrow",
    "half_zeros",
    "ascending",
    "descending",
    "all_equal",
    "half_minus_inf",
    "mask_1e9",
)
_DECODE_DIST = ((1, 8192), (1, 131072), (4, 262144), (16, 32768), (64, 65536), (64, 131072), (256, 16384))
_PREFILL_DIST = ((1024, 8192), (1024, 32768), (1024, 131072), (4096, 8192), (4096, 32768), (4096, 65536))


def _decode() -> list[Case]:
    # All 51 shapes in both regimes: the goals speak of both, and a "warm" call on scores larger than L2 is a cold one.
    return _both((Case("decode", b, w) for b, w in DECODE_SHAPES), warm_all=True)


def _prefill() -> list[Case]:
    cold = [Case(mode, r, w) for r, w in PREFILL_SHAPES for mode in ("ragged", "packed")]
    narrow = [Case("ragged", r, w, dtype="bfloat16") for r, w in PREFILL_SHAPES]
    return _both(cold) + narrow


def _packed() -> list[Case]:
    return _both(Case("packed", r, w) for r, w in PREFILL_SHAPES)


def _k() -> list[Case]:
    out = []
    for k in (512, 1024, 2048):  # 2048 again: a comparison needs the same run
        out += [Case("decode", b, w, k) for b in (1, 16, 64, 256) for w in (8192, 32768, 131072)]
        out += [Case("ragged", r, w, k) for r in (1024, 4096) for w in (8192, 16384, 65536)]
    return out


def _dist() -> list[Case]:
    out = [Case("decode", b, w, dist=d) for d in DISTS for b, w in _DECODE_DIST]
    out += [Case("ragged", r, w, dist=d) for d in DISTS for r, w in _PREFILL_DIST]
    # The recorded scores have windows up to 8192.
    out += [Case("decode", b, w, dist="recorded") for b, w in ((1, 8192), (64, 8192), (256, 8192))]
    out += [Case("decode", b, 8192) for b in (64, 256)]
    out += [Case("ragged", r, 8192, dist="recorded") for r in (1024, 4096)]
    return out


def _mtp() -> list[Case]:
    out = [Case("mtp", r * NEXT_N, w) for r in (1, 4, 16, 64) for w in (8192, 32768, 131072)]
    out += [Case("mixed", r, 131072) for r in (64, 256)]
    return _both(out)


def _smoke() -> list[Case]:
    # Seconds on a GPU, a minute on a CPU: says that everything works, not how fast.
    cases = (Case("decode", 2, 4096), Case("mtp", 4, 4096), Case("mixed", 4, 8192), Case("ragged", 8, 8192))
    return _both([*cases, Case("packed", 8, 8192), Case("decode", 2, 4096, 512, "bfloat16", "narrow")])


SUITES: dict[str, Callable[[], list[Case]]] = {
    "decode": _decode,
    "prefill": _prefill,
    "k": _k,
    "dist": _dist,
    "mtp": _mtp,
    "packed": _packed,
    "smoke": _smoke,
}


def suite(names: Iterable[str]) -> list[Case]:
    """The cases of some suites in order, each once.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    out: dict[Case, None] = {}
    for name in names:
        if name not in SUITES:
            raise ValueError(f"suite: expected one of {', '.join(SUITES)}, got {name!r}")
        out.update(dict.fromkeys(SUITES[name]()))
    return list(out)


_CONDITION = re.compile(r"(?P<field>\w+)\s*(?P<operator><=|>=|=|<|>)\s*(?P<value>\S+)")
_FIELDS = {field.name for field in fields(Case)}


def select(cases: Iterable[Case], only: str) -> list[Case]:
    """The cases that meet every condition of ``only``.

    Conditions are separated by spaces: ``mode=decode rows=1,16 width>=65536 dist=normal,narrow``. The fields are those
    of :class:`Case`; ``=`` takes a list (any of), ``<``, ``<=``, ``>``, ``>=`` one number.

    Raises
    ------
    ValueError
        For text that is no condition, and for an unknown field.
    """
    tests: list[Callable[[Case], bool]] = []
    for word in only.split():
        match = _CONDITION.fullmatch(word)
        if not match or match["field"] not in _FIELDS:
            raise ValueError(f"only: expected FIELD=A,B or FIELD>=N with a field of {sorted(_FIELDS)}, got {word!r}")
        tests.append(_condition(match["field"], match["operator"], match["value"]))
    return [case for case in cases if all(test(case) for test in tests)]


def _condition(field: str, operator: str, value: str) -> Callable[[Case], bool]:
    if operator == "=":
        allowed = set(value.split(","))
        return lambda case: str(getattr(case, field)) in allowed
    if not value.isdigit() or field not in ("rows", "width", "k"):
        raise ValueError(f"only: {operator} compares rows, width or k with a number, got {field}{operator}{value}")
    bound = int(value)
    compare: dict[str, Callable[[int], bool]] = {
        "<": lambda x: x < bound,
        "<=": lambda x: x <= bound,
        ">": lambda x: x > bound,
        ">=": lambda x: x >= bound,
    }
    return lambda case: compare[operator](int(getattr(case, field)))
