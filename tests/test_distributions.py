"""Named distributions are what their name says: later tests lean on it."""

from __future__ import annotations

import pytest
import torch

from dsa_topk.testing import distributions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", distributions.NAMES)
def test_shape_dtype_and_repeatability(name: str, dtype: torch.dtype) -> None:
    for rows, width in ((3, 700), (1, 1), (0, 5), (2, 0)):
        scores = distributions.make(name, rows, width, dtype=dtype, k=64, seed=5)
        assert scores.shape == (rows, width)
        assert scores.dtype == dtype
        assert scores.is_contiguous()
        again = distributions.make(name, rows, width, dtype=dtype, k=64, seed=5)
        assert torch.equal(scores.view(torch.uint8), again.view(torch.uint8))


def test_every_distribution_is_described() -> None:
    assert set(distributions.ABOUT) == set(distributions.NAMES)


def test_seeds_differ() -> None:
    assert not torch.equal(distributions.make("normal", 2, 50, seed=1), distributions.make("normal", 2, 50, seed=2))


def test_unknown_names_and_types_raise() -> None:
    with pytest.raises(ValueError, match="name: expected one of normal"):
        distributions.make("gaussian", 1, 1)
    with pytest.raises(ValueError, match="dtype"):
        distributions.make("normal", 1, 1, dtype=torch.float64)


def test_real_looking_scores() -> None:
    indexer = distributions.make("indexer", 8, 4000)
    assert (indexer < 0).any()
    assert (indexer > 0).any()
    zeros = distributions.make("half_zeros", 8, 4000)
    assert 0.45 < float((zeros == 0).float().mean()) < 0.55


def test_tie_makers() -> None:
    plateau = distributions.make("plateau", 4, 3000)
    assert ((plateau != 0).sum(1) == 100).all()
    assert all(row[row != 0].unique().numel() == 100 for row in plateau)
    assert distributions.make("all_equal", 2, 100).unique().numel() == 1
    two = distributions.make("two_values", 2, 3000, k=1000)
    assert ((two == 2).sum(1) == 700).all()
    assert distributions.make("ulp_noise", 2, 3000).unique().numel() == 3
    assert distributions.make("quantised", 2, 3000).unique().numel() < 800
    blocks = distributions.make("repeated_blocks", 2, 640).view(2, 10, 64)
    assert (blocks == blocks[:, :, :1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ladders_are_distinct_neighbours(dtype: torch.dtype) -> None:
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    bits = distributions.make("ladder", 2, 5000, dtype=dtype).view(integer).long()
    assert all(row.unique().numel() == 5000 for row in bits)
    assert (bits.amax(1) - bits.amin(1) == 4999).all()
    assert torch.equal(
        distributions.make("negated_ladder", 2, 50, dtype=dtype), -distributions.make("ladder", 2, 50, dtype=dtype)
    )


def test_sorted_both_ways() -> None:
    assert (distributions.make("ascending", 2, 500).diff(dim=1) >= 0).all()
    assert (distributions.make("descending", 2, 500).diff(dim=1) <= 0).all()


def test_coarse_keys_collapse() -> None:
    """What a backend that ranks in float16 cannot tell apart."""
    scores = distributions.make("fp16_bin", 3, 12000, k=2048)
    middle = scores[(scores > 0.9) & (scores < 1.5)]
    assert middle.numel() > 3 * 4000
    assert middle.half().unique().numel() < 8 < 3000 < middle.unique().numel()
    assert distributions.make("beyond_fp16", 2, 4000).half().isinf().float().mean() > 0.9
    assert distributions.make("narrow", 2, 4000).half().unique().numel() < 4
    hot = distributions.make("one_hot_bucket", 2, 4000)
    assert ((hot >= 1) & (hot <= 1 + 2**-8)).float().mean() > 0.85


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_are_subnormal(dtype: torch.dtype) -> None:
    scores = distributions.make("subnormals", 2, 4000, dtype=dtype).double()
    assert (scores != 0).all()
    assert (scores.abs() < torch.finfo(dtype).tiny).all()
    assert (scores < 0).any()
    assert (scores > 0).any()


def test_special_values() -> None:
    zeros = distributions.make("mixed_zeros", 3, 4000, k=400)
    sign = torch.signbit(zeros[zeros == 0])
    assert 0.4 < float(sign.float().mean()) < 0.6
    assert ((zeros > 0).sum(1) == 100).all()
    infinite = distributions.make("infinities", 3, 4000, k=400)
    assert (infinite[0] == torch.inf).sum() == 600
    assert (infinite[1] == -torch.inf).sum() == 2000
    assert infinite[2].isfinite().sum() == 280
    mask = distributions.make("mask_1e9", 3, 4000)
    assert 0.5 < float((mask == -1e9).float().mean()) < 0.7
    spread = distributions.make("outliers", 3, 400)
    assert (spread.amax(1) == 1e30).all()
    assert (spread.amin(1) == -1e30).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_both_signs_and_many_payloads(dtype: torch.dtype) -> None:
    scores = distributions.make("nan_both_signs", 6, 4000, dtype=dtype)
    share = scores.isnan().float().mean(1)
    assert (share[::3] < 0.01).all()
    assert (share[2::3] > 0.8).all()
    bits = scores.view(torch.int32 if dtype == torch.float32 else torch.int16)[scores.isnan()]
    assert bits.unique().numel() > 100
    assert (bits < 0).any()
    assert (bits > 0).any()
    assert distributions.make("all_nan", 2, 30, dtype=dtype).isnan().all()


def test_bit_patterns_cover_both_halves_and_nan() -> None:
    half = distributions.make("bit_patterns", 4, 65536, dtype=torch.float16)
    assert half.view(torch.int16).unique().numel() > 60000
    assert half.isnan().any()
    assert half.isinf().any()
