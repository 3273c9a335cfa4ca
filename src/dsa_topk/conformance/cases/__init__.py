"""All cases of the suite, by kind: what is in a row, where it lies, how it is called, and sweeps over both."""

from __future__ import annotations

from . import placement, routes, selection, sweep
from .common import Case, Setting, Spec

CASES: dict[str, Case] = {case.id: case for case in (*selection.CASES, *placement.CASES, *routes.CASES, *sweep.CASES)}

__all__ = ["CASES", "Case", "Setting", "Spec"]
