"""Which problems a suite's name stands for."""

from __future__ import annotations

import torch

from .cases import CASES, Case, Setting, Spec


def select(suite: str) -> list[Case]:
    """The cases of ``quick``, ``full``, ``fault:ID`` or ``case:ID`` (several IDs separated by commas).

    Raises
    ------
    ValueError
        For another name.
    """
    if suite == "full":
        return list(CASES.values())
    if suite == "quick":
        return [case for case in CASES.values() if case.quick]
    kind, _, wanted = suite.partition(":")
    if kind not in ("fault", "case") or not wanted:
        raise ValueError(f"suite: expected quick, full or fault:ID, got {suite!r}")
    unknown = [name for name in wanted.split(",") if name not in CASES]
    if unknown:
        raise ValueError(f"suite: no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    return [CASES[name] for name in wanted.split(",")]


def specs(suite: str, device: torch.device) -> list[Spec]:
    """All problems of a suite, unbuilt, always in the same order.

    ``quick``, and everything on a CPU, takes the small sizes: fewer rows and seeds, the same kinds.
    """
    setting = Setting(device, small=suite == "quick" or device.type == "cpu")
    return [spec for case in select(suite) for spec in case.build(setting)]
