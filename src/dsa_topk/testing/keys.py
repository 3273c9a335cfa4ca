"""Order-preserving integer keys of scores, the checker's own: comparing two keys is comparing two scores."""

from __future__ import annotations

import torch

INT32_MIN = -(2**31)

# dtype -> (same-size integer type, magnitude mask, bits of +inf, bits of -inf as a signed integer)
_BITS = {
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000, -0x00800000),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80, -0x0080),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00, -0x0400),
}


def raw_bits(scores: torch.Tensor) -> torch.Tensor:
    """The bits of ``scores`` as integers of the same size (a view, any stride)."""
    return scores.view(_BITS[scores.dtype][0])


def minus_infinity_bits(dtype: torch.dtype) -> int:
    """The bits of ``-inf`` in ``dtype``, as the signed integer that :func:`raw_bits` shows."""
    return _BITS[dtype][3]


def key_bits(dtype: torch.dtype) -> int:
    """How many bits a key of ``dtype`` has."""
    return 32 if dtype == torch.float32 else 16


def order_keys(scores: torch.Tensor) -> torch.Tensor:
    """int32 keys with ``key(a) < key(b)`` exactly when ``a`` ranks below ``b`` under the contract.

    Equal scores have equal keys: both zeros are 0, and every NaN has the smallest key of all, below ``-inf``.
    """
    _, magnitude, infinity, _ = _BITS[scores.dtype]
    bits = raw_bits(scores).to(torch.int32)  # 16-bit types are sign-extended
    size = bits & magnitude
    # Sign and magnitude to two's complement; -0.0 becomes -0 = 0 by itself, and no key reaches the NaN's value.
    key = torch.where(bits < 0, -size, size)
    return key.masked_fill_(size > infinity, lowest_key(scores.dtype))


def lowest_key(dtype: torch.dtype) -> int:
    """The key of NaN."""
    return INT32_MIN if dtype == torch.float32 else -(2**15)
