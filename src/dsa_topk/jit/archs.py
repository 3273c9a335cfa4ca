"""Architecture names: parsing, the target that a device gets by default, and which targets a device can run."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NAME = re.compile(r"(?:sm_|compute_)?(\d{2,3})([af]?)")

# What the package is compiled for when nobody says otherwise; also what the gates compile.
TARGETS: tuple[str, ...] = ("80", "90a", "100", "120")

# Integrated GPUs: cubins of the desktop parts of the same major do not run there.
_INTEGRATED = {(8, 7): "87", (11, 0): "110"}
_BASE = {8: "80", 9: "90a", 10: "100", 12: "120"}


def parse(text: str | Sequence[str]) -> tuple[str, ...]:
    """Turn ``"80,90a"``, ``"sm_90a"`` or a sequence of such names into a canonical tuple: sorted, no duplicates.

    Raises
    ------
    ValueError
        For an empty list or a name that is no architecture of 80 or later.
    """
    if not isinstance(text, str) and not all(isinstance(part, str) for part in text):
        raise TypeError(f"archs: expected names like '90a', got {list(text)!r}")
    parts = [text] if isinstance(text, str) else list(text)
    names = [name.strip() for part in parts for name in part.split(",") if name.strip()]
    found = set()
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) < 80:
            raise ValueError(f"archs: expected names like 80, 90a, sm_100 or 120f (80 or later), got {name!r}")
        found.add((int(match[1]), match[2]))
    if not found:
        raise ValueError(f"archs: expected at least one architecture, got {text!r}")
    return tuple(f"{number}{suffix}" for number, suffix in sorted(found))


def native(capability: tuple[int, int]) -> str:
    """The target built for a device: the oldest one of its family, so that one build serves the family."""
    major, minor = capability
    if major < 8:
        raise ValueError(f"compute capability {major}.{minor}: the CUDA kernels need 8.0 or later")
    return _INTEGRATED.get(capability) or _BASE.get(major) or f"{major}{minor}"


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a cubin of ``arch`` runs on a device of this compute capability (CUDA's binary compatibility rules)."""
    match = _NAME.fullmatch(arch)
    if match is None:
        return False
    major, minor = divmod(int(match[1]), 10)
    if match[2] == "a":
        return (major, minor) == capability
    if capability in _INTEGRATED and not match[2]:
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


def acceptable(capability: tuple[int, int]) -> tuple[str, ...]:
    """Targets to look for in a cache on behalf of a device, best first; never one worse than :func:`native`."""
    major, minor = capability
    families = range(minor, -1, -1) if major >= 10 else ()  # CUDA has family targets from 10.0 on
    names = [f"{major}{minor}a", *(f"{major}{m}f" for m in families), native(capability)]
    return tuple(dict.fromkeys(name for name in names if runs_on(name, capability)))
