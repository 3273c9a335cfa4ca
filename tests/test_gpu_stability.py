"""A row's result is a pure function of the row: the same bytes in every repeat, batch, place and launch."""

from __future__ import annotations

import pytest
import torch

from dsa_topk.testing import CallShape, distributions
from gpu_helpers import CPU, DTYPES, Mode, Outputs, Target, Verdicts, launched_as, on_two_gpus, select

BASE = (
    "normal",
    "indexer",
    "half_zeros",
    "plateau",
    "all_equal",
    "ladder",
    "quantised",
    "bit_patterns",
    "ascending",
    "ulp_noise",
)


def base_rows(width: int, k: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of each distribution in `BASE`, and lengths that give every path something to do."""
    scores = torch.cat([distributions.make(name, 1, width, dtype=dtype, device=device, k=k, seed=3) for name in BASE])
    lengths = [width, width - 7, width, k + 100, width, k - 1, width // 2, width, 200, width - 1]
    return scores, torch.tensor(lengths, dtype=torch.int32, device=device)


def paged(rows: int, width: int, k: int, lengths: torch.Tensor, table: torch.Tensor, owner: torch.Tensor) -> CallShape:
    return CallShape(
        "batch", "paged", rows, width, k, lengths=lengths, page_table=table, page_size=64, row_to_batch=owner
    )


def chosen(outputs: Outputs, index: torch.Tensor) -> Outputs:
    """The same rows of every output."""
    return Outputs(
        *(None if part is None else part[index] for part in (outputs.out, outputs.positions, outputs.scores))
    )


@pytest.mark.parametrize("order", ["position", "score"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "k"), [(20011, 512), (131072, 2048)])
def test_a_row_is_the_same_in_any_batch(target: Target, width: int, k: int, dtype: torch.dtype, order: str) -> None:
    """Batches of 1, 7, 64 and 1024 rows drawn from the base rows at random, by every launch, against the reference."""
    width = width // 8 if target.small else width
    k = k // 4 if target.small else k
    scores, lengths = base_rows(width, k, dtype, target.device)
    table = torch.randperm(len(BASE) * (width // 64 + 1), dtype=torch.int32).reshape(len(BASE), -1).to(target.device)
    mode = Mode(order, "smallest", return_scores=True, positions=True)
    every = torch.arange(len(BASE), device=target.device)
    reference = Target(CPU.backend, target.device)
    expected = select(reference, paged(len(BASE), width, k, lengths, table, every), scores, mode)
    verdicts = Verdicts()
    for rows in (1, 7, 64) if target.small else (1, 7, 64, 1024):
        index = torch.randint(0, len(BASE), (rows,)).to(target.device)
        batch, shape = scores[index], paged(rows, width, k, lengths[index], table, index)
        want = chosen(expected, index)
        for plan in target.plans(rows, width, k):
            with launched_as(plan):
                verdicts.add(select(target, shape, batch, mode).differs(want), f"{rows} rows, {plan}")
    verdicts.settle()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fifty_repeats(target: Target, dtype: torch.dtype) -> None:
    width, k = (5000, 300) if target.small else (131072, 2048)
    scores, lengths = base_rows(width, k, dtype, target.device)
    shape = CallShape("repeat", "positions", len(BASE), width, k, lengths=lengths)
    mode = Mode(return_scores=True)
    verdicts = Verdicts()
    for plan in target.plans(len(BASE), width, k):
        with launched_as(plan):
            first = select(target, shape, scores, mode)
            for turn in range(2 if target.small else 50):
                verdicts.add(select(target, shape, scores, mode).differs(first), f"repeat {turn}, {plan}")
    verdicts.settle()


@on_two_gpus
def test_devices_agree_and_the_current_one_stays() -> None:
    """Tensors on cuda:1 while cuda:0 is current: on that device's current stream, the same bits as on cuda:0."""
    scores, lengths = base_rows(131072, 2048, torch.float32, "cuda:0")
    shape = CallShape("devices", "positions", len(BASE), 131072, 2048, lengths=lengths)
    torch.cuda.set_device(0)
    first = select(Target("cuda", "cuda:0"), shape, scores, Mode())
    other_shape, other_scores = shape.to("cuda:1"), scores.to("cuda:1")
    stream = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize("cuda:1")
    before = torch.cuda.current_stream("cuda:0")
    with torch.cuda.stream(stream):
        torch.cuda.set_device(0)
        second = select(Target("cuda", "cuda:1"), other_shape, other_scores, Mode())
        assert torch.cuda.current_stream("cuda:1") == stream
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream("cuda:0") == before
    stream.synchronize()
    assert torch.equal(second.out.cpu(), first.out.cpu())
    third = select(Target("cuda", "cuda:1"), other_shape, other_scores, Mode())  # on its default stream
    assert torch.equal(third.out.cpu(), first.out.cpu())
