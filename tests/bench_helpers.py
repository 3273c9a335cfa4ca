"""What the benchmark's tests share: small cases, a timer that makes its times up, sessions and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from dsa_topk.bench import cases
from dsa_topk.bench.cases import Case
from dsa_topk.bench.record import Record, Row
from dsa_topk.bench.session import OURS, Session
from dsa_topk.bench.timing import Contestant, Plan, Timing

CPU = torch.device("cpu")
HEADER = {
    "commit": "c" * 40,
    "content_hash": "h" * 64,
    "gpu": "Test GPU",
    "driver": "1",
    "cuda": "13.0",
    "torch": "2",
    "command": "test",
    "date": "2026-01-01T00:00:00Z",
}
# A case of each mode, as small as its rules allow (mtp: two requests; mixed: one row full, others short).
SMALL = [Case(mode, 8, 512, 64) for mode in cases.MODES]


class FakeTimer:
    """Runs each contestant once and returns made-up times: ours 10 us, anything else by its name."""

    def __init__(self, times: Mapping[str, float] | None = None) -> None:
        self.times = {OURS: 10.0, **(times or {})}
        self.seen: list[list[str]] = []

    def measure(
        self,
        contestants: Mapping[str, Contestant],
        plan: Plan,
        *,
        reset: Callable[[str], None] | None = None,
        inspect: Callable[[str, int], None] | None = None,
    ) -> dict[str, Timing]:
        self.seen.append(list(contestants))
        for name, call in contestants.items():
            if reset is not None:
                reset(name)
            call(plan.buffers - 1)
            if inspect is not None:
                inspect(name, plan.buffers - 1)
        return {name: Timing(self.times.get(name, 20.0), 0.01, plan.reps, 4) for name in contestants}


def session(tmp_path: Path, timer: FakeTimer, **options: object) -> Session:
    return Session(CPU, timer, Record(dict(HEADER)), tmp_path / "r.json", say=lambda text: None, **options)  # type: ignore[arg-type]


def row(case: Case = SMALL[2], us: float = 10.0, **changes: object) -> Row:
    return replace(Row(case, us, 0.01, 5.0, {"sgl_v2": 15.0, "ds_fp32": 30.0}, True), **changes)  # type: ignore[arg-type]
