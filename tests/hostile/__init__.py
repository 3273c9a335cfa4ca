"""Hostile calls (issue 7 point 4): each must be refused before a byte is touched, or get the contract's answer.

``memory`` puts a call's tensors amid poison, ``legal`` and ``refused`` hold the calls, ``shared`` those whose outputs
lie beside or on their inputs, ``far`` those beyond 2**31 elements. tests/test_hostile.py runs them on the reference, in
the emulator and on a GPU; tools/sanitize_driver.py runs `everything` under memcheck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .far import FAR, attempt_far
from .legal import EXTREMES, LEGAL, make, spread
from .memory import INT32, INT64, UNWRITTEN, Placed, attempt, call_public, judge
from .refused import REFUSED, refusable, refuse
from .shared import aliases, attempt_neighbours, neighbours

__all__ = [
    "EXTREMES",
    "FAR",
    "INT32",
    "INT64",
    "LEGAL",
    "REFUSED",
    "UNWRITTEN",
    "Placed",
    "aliases",
    "attempt",
    "attempt_far",
    "attempt_neighbours",
    "call_public",
    "everything",
    "judge",
    "make",
    "neighbours",
    "refusable",
    "refuse",
    "spread",
]


def everything(backend: str, device: str) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Every attempt here as (name, what to run: it says what is wrong, or None); guards and tight memory take turns."""
    turn = 0
    for group, calls in LEGAL.items():
        for name, call in calls():
            turn += 1
            yield f"{group}: {name}", lambda call=call, pad=33 * (turn % 2): attempt(call, backend, device, pad)
    for name, given, there in neighbours(device):
        yield f"neighbours: {name}", lambda given=given, there=there: attempt_neighbours(given, there, backend)
    for name, placed, outputs in aliases(device):
        refusal = (name, outputs, ValueError, "overlap")
        yield f"aliases: {name}", lambda placed=placed, refusal=refusal: refuse(placed, refusal, backend)
    for form in ("positions", "ragged", "paged"):
        for group, refusals in REFUSED.items():
            placed = refusable(form, device)
            for refusal in refusals(form, placed):
                name = f"{group}: {form}: {refusal[0]}"
                yield name, lambda placed=placed, refusal=refusal: refuse(placed, refusal, backend)
    for name in FAR:
        yield f"far: {name}", lambda name=name: attempt_far(name, backend, device)
