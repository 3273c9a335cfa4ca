"""Named score distributions: what real indexers produce, and what has broken top-k kernels.

Each builder returns float32, or (for those that speak of bit patterns) the scores' own type; :func:`make` converts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# dtype -> (integer type of the same size, mantissa bits, sign bit as integer, bits of 1.0, bits of +inf)
_LAYOUT = {
    torch.float32: (torch.int32, 23, -(2**31), 0x3F800000, 0x7F800000),
    torch.bfloat16: (torch.int16, 7, -(2**15), 0x3F80, 0x7F80),
    torch.float16: (torch.int16, 10, -(2**15), 0x3C00, 0x7C00),
}


@dataclass(frozen=True, slots=True)
class _Source:
    """Random numbers of one batch of scores."""

    rows: int
    width: int
    k: int
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size or (self.rows, self.width), generator=self.generator, device=self.device)

    def uniform(self, *size: int) -> torch.Tensor:
        return torch.rand(size or (self.rows, self.width), generator=self.generator, device=self.device)

    def integers(self, low: int, high: int) -> torch.Tensor:
        """int64 [rows, width], ``low <= x < high``."""
        return torch.randint(low, high, (self.rows, self.width), generator=self.generator, device=self.device)

    def permutation(self) -> torch.Tensor:
        """int64 [rows, width]: another permutation of ``0 .. width - 1`` in every row."""
        return self.uniform().argsort(1)

    def full(self, value: float) -> torch.Tensor:
        return torch.full((self.rows, self.width), value, device=self.device)

    def from_bits(self, bits: torch.Tensor) -> torch.Tensor:
        """Scores with these bits (int64, low bits used)."""
        integer = _LAYOUT[self.dtype][0]
        size = 8 * integer.itemsize
        return ((bits + 2 ** (size - 1)) % 2**size - 2 ** (size - 1)).to(integer).view(self.dtype)

    @property
    def one(self) -> int:
        """The bits of 1.0."""
        return _LAYOUT[self.dtype][3]

    @property
    def steps(self) -> int:
        """How many finite numbers there are from 1.0 up."""
        return _LAYOUT[self.dtype][4] - self.one


def _indexer(r: _Source) -> torch.Tensor:
    heads, dim = 8, 32
    keys = r.normal(r.width, dim)
    weights = r.normal(heads)  # both signs, as trained indexers have
    scores = r.full(0.0)
    for head in range(heads):
        scores += weights[head] * (r.normal(r.rows, dim) @ keys.T).relu_()
    return scores


def _half_zeros(r: _Source) -> torch.Tensor:
    return r.normal().relu_()


def _plateau(r: _Source) -> torch.Tensor:
    place = r.permutation()
    return torch.where(place < min(100, r.k // 2 + 1), 1.0 + place, 0.0)


def _ladder(r: _Source) -> torch.Tensor:
    return r.from_bits(r.one + r.permutation() % r.steps)


def _fp16_bin(r: _Source) -> torch.Tensor:
    """0.4 k clear winners, the rest of the candidates distinct in float32 but equal in float16, then losers."""
    place = r.permutation()
    winners = int(0.4 * r.k)
    crowd = min(r.width, max(4200, r.width // 2))
    close = r.from_bits(r.one + 1 + place % (4000 if r.dtype == torch.float32 else 2)).float()
    return torch.where(place < winners, 2 + r.uniform(), torch.where(place < winners + crowd, close, -1 - r.uniform()))


def _ulp_noise(r: _Source) -> torch.Tensor:
    return r.from_bits(r.one + 2**4 + r.integers(-1, 2))


def _subnormals(r: _Source) -> torch.Tensor:
    return r.from_bits(r.integers(1, 1 << _LAYOUT[r.dtype][1]) + r.integers(0, 2) * _LAYOUT[r.dtype][2])


def _mixed_zeros(r: _Source) -> torch.Tensor:
    place, sign = r.permutation(), r.uniform()
    zeros = torch.where(sign < 0.5, 0.0, -0.0)
    few = r.k // 4
    return torch.where(place < few, 0.5 + r.uniform(), torch.where(place > r.width - r.width // 8, -r.uniform(), zeros))


def _infinities(r: _Source) -> torch.Tensor:
    """Rows by turns: more than k of +inf; half -inf; fewer than k finite ones above -inf."""
    place, normal = r.permutation(), r.normal()
    turn = torch.arange(r.rows, device=r.device)[:, None] % 3
    many = torch.where(place < r.k + r.k // 2, torch.inf, normal)
    half = torch.where(place < r.width // 2, -torch.inf, normal)
    few = torch.where(place < int(0.7 * r.k), normal, -torch.inf)
    return torch.where(turn == 0, many, torch.where(turn == 1, half, few))


def _nan_both_signs(r: _Source) -> torch.Tensor:
    """A few, half or most scores NaN, row by row, of both signs and many payloads."""
    _, mantissa, sign, _, infinity = _LAYOUT[r.dtype]
    nan = r.from_bits(infinity + r.integers(1, 1 << mantissa) + r.integers(0, 2) * sign)
    share = torch.tensor([0.001, 0.5, 0.83], device=r.device)[torch.arange(r.rows, device=r.device) % 3]
    return torch.where(r.uniform() < share[:, None], nan, r.normal().to(r.dtype))


def _bit_patterns(r: _Source) -> torch.Tensor:
    size = 8 * r.dtype.itemsize
    return r.from_bits(r.integers(0, 2**size))


def _one_hot_bucket(r: _Source) -> torch.Tensor:
    """Nine of ten scores inside one 2**-8 slice of [1, 2), the others far away on both sides."""
    inside = 1 + r.uniform() * 2.0**-8
    return torch.where(r.uniform() < 0.9, inside, 100 * r.normal())


def _outliers(r: _Source) -> torch.Tensor:
    """Normal scores and, in every row, one of 1e30 and one of -1e30 that stretch its range."""
    place = r.permutation()
    return r.normal().masked_fill(place == 0, 1e30).masked_fill(place == 1, -1e30)


_BUILDERS: dict[str, Callable[[_Source], torch.Tensor]] = {
    "normal": lambda r: r.normal(),
    "indexer": _indexer,
    "half_zeros": _half_zeros,
    "plateau": _plateau,
    "all_equal": lambda r: r.full(0.7315),
    "narrow": lambda r: 1 + 1e-4 * r.normal(),
    "ladder": _ladder,
    "negated_ladder": lambda r: -_ladder(r),
    "ascending": lambda r: r.normal().sort(1)[0],
    "descending": lambda r: r.normal().sort(1, descending=True)[0],
    "beyond_fp16": lambda r: 1e6 * r.normal(),
    "subnormals": _subnormals,
    "mixed_zeros": _mixed_zeros,
    "infinities": _infinities,
    "mask_1e9": lambda r: torch.where(r.uniform() < 0.6, -1e9, r.normal()),
    "nan_both_signs": _nan_both_signs,
    "all_nan": lambda r: r.full(torch.nan),
    "bit_patterns": _bit_patterns,
    "one_hot_bucket": _one_hot_bucket,
    "outliers": _outliers,
    "two_values": lambda r: torch.where(r.permutation() < int(0.7 * r.k), 2.0, 1.0),
    "quantised": lambda r: (64 * r.normal()).round() / 64,
    "fp16_bin": _fp16_bin,
    "ulp_noise": _ulp_noise,
    "exponents": lambda r: torch.exp2(252 * r.uniform() - 126) * torch.where(r.uniform() < 0.5, 1.0, -1.0),
    "repeated_blocks": lambda r: r.normal(r.rows, -(-r.width // 64)).repeat_interleave(64, 1)[:, : r.width],
}

#: What each distribution stands for, in a line.
ABOUT: dict[str, str] = {
    "normal": "standard normal",
    "indexer": "sum over heads of w_h * relu(q_h . k), w of both signs, keys shared by the rows",
    "half_zeros": "relu(normal): about half exact zeros",
    "plateau": "up to 100 distinct winners, every other score exactly zero",
    "all_equal": "one value",
    "narrow": "1 + 1e-4 * normal: a range of few bits",
    "ladder": "neighbouring bit patterns from 1.0 up, shuffled",
    "negated_ladder": "the ladder with the sign changed",
    "ascending": "normal, sorted upwards",
    "descending": "normal, sorted downwards",
    "beyond_fp16": "1e6 * normal: most of it is infinite in float16",
    "subnormals": "subnormal numbers of both signs",
    "mixed_zeros": "zeros of both signs at the k-th place",
    "infinities": "more than k +inf, half -inf, or fewer than k finite, by turns",
    "mask_1e9": "six of ten masked with -1e9",
    "nan_both_signs": "NaN of both signs and many payloads, 0.1 / 50 / 83 % by turns",
    "all_nan": "NaN only",
    "bit_patterns": "uniform over all bit patterns, NaN and infinities included",
    "one_hot_bucket": "nine of ten within 2**-8 of each other",
    "outliers": "normal, with 1e30 and -1e30 in every row",
    "two_values": "0.7 k scores of 2, the rest 1",
    "quantised": "multiples of 1/64: many ties",
    "fp16_bin": "thousands around the k-th score that are distinct in float32 and equal in float16",
    "ulp_noise": "one value and its two neighbours",
    "exponents": "uniform over the exponents, both signs",
    "repeated_blocks": "64 equal neighbours at a time",
}

NAMES: tuple[str, ...] = tuple(_BUILDERS)


def make(
    name: str,
    rows: int,
    width: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    k: int = 2048,
) -> torch.Tensor:
    """Scores of a named distribution.

    Parameters
    ----------
    name : str
        One of :data:`NAMES`; :data:`ABOUT` describes them.
    rows, width : int
        Shape.
    dtype : torch.dtype
        float32, bfloat16 or float16.
    device : torch.device or str
        Where to make them; another device draws other numbers.
    seed : int
        Same arguments, same scores.
    k : int
        Where the k-th place is, for those that put something there.

    Returns
    -------
    Tensor [rows, width], contiguous
    """
    if name not in _BUILDERS:
        raise ValueError(f"name: expected one of {', '.join(NAMES)}, got {name!r}")
    if dtype not in _LAYOUT:
        raise ValueError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    scores = _BUILDERS[name](_Source(rows, width, k, dtype, device, generator))
    return scores.to(dtype).contiguous()
