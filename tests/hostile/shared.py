"""Outputs beside inputs, which is legal, and outputs on inputs or on each other, which is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from dsa_topk._call import Call
from dsa_topk.testing import distributions
from gpu_helpers import bits

from .memory import INT32, OUTPUTS, TENSORS, Placed, call_public, judge
from .refused import refusable


def neighbours(device: str) -> Iterator[tuple[str, Call, Call]]:
    """Outputs close to inputs and to each other, without a shared byte: (name, call on the CPU, call on ``device``)."""
    k, n = 5, 40
    width = n + 2 * k + 1
    buffer = torch.full((4, width), 0x5A5A5A5A, dtype=INT32, device=device)
    values = distributions.make("normal", 4, n, seed=1, k=k)
    lengths = torch.tensor([n, 3, 20, 0], dtype=INT32)
    buffer[:, :n] = bits(values).to(device)
    buffer[:, n] = lengths.to(device)
    offsets = torch.arange(4, dtype=INT32)
    given = Call("ragged", values, lengths, k, out_offsets=offsets)
    there = dataclasses.replace(
        given,
        scores=buffer[:, :n].view(torch.float32),
        lengths=buffer[:, n],
        out_offsets=offsets.to(device),
        out=buffer[:, n + 1 : n + 1 + k],
        out_positions=buffer[:, n + 1 + k :],
    )
    yield "columns of one buffer", given, there
    memory = torch.zeros(4 * n + 4 + 2 * 4 * k, dtype=INT32, device=device)
    memory[: 4 * n] = bits(values).reshape(-1).to(device)
    memory[4 * n : 4 * n + 4] = lengths.to(device)
    end = 4 * n + 4
    there = dataclasses.replace(
        there,
        scores=memory[: 4 * n].view(torch.float32).view(4, n),
        lengths=memory[4 * n : end],
        out=memory[end : end + 4 * k].view(4, k),
        out_positions=memory[end + 4 * k :].view(4, k),
    )
    yield "one behind the other", given, there


def attempt_neighbours(given: Call, there: Call, backend: str) -> str | None:
    """A call whose outputs lie beside its inputs: what is wrong with the answer or with the inputs, or None."""
    before = [there.scores.clone(), there.lengths.clone()]  # type: ignore[union-attr]
    out = call_public(there, backend)
    changed = not torch.equal(bits(there.scores), bits(before[0])) or not torch.equal(there.lengths, before[1])  # type: ignore[arg-type]
    return judge(given, out, there.out_positions, None) or ("an input was changed" if changed else None)


def aliases(device: str) -> Iterator[tuple[str, Placed, dict[str, Any]]]:
    """Outputs that share at least one byte with something else: (name, call in guarded memory, its outputs)."""
    rows, k = 4, 5
    for name in TENSORS:
        form = "ragged" if name == "out_offsets" else "paged"
        for output in OUTPUTS:
            for shared in ("first", "last", "all"):
                placed = refusable(form, device)
                victim = getattr(placed.call, name)
                if name == "scores":
                    victim = victim.view(INT32)
                words = victim.numel() * victim.element_size() // 4
                start = {"first": -rows * k + 1, "last": words - 1, "all": 0}[shared]
                frame = placed.frames[name]
                flat = frame._whole.view(INT32)
                offset = frame._place[2] * victim.element_size() // 4 + start
                yield (
                    f"{output} on the {shared} of {name}",
                    placed,
                    {output: flat.as_strided((rows, k), (k, 1), offset)},
                )
    placed = refusable("paged", device)
    both = placed.call.out
    assert both is not None
    yield "out is out_positions", placed, {"out": both, "out_positions": both}
    placed = refusable("paged", device)
    flat = placed.frames["out"]._whole
    shifted = flat.as_strided((rows, k), (k, 1), 33 + rows * k - 1)
    yield "out_positions begins on the end of out", placed, {"out_positions": shifted}
