"""Tools that tests, demo, benchmarks and users share: the checker, named score distributions, named call shapes.

Nothing here imports the reference or a backend, so that a fault there cannot hide here.
"""

from __future__ import annotations

from . import distributions, shapes
from .checker import check_selection
from .shapes import CallShape
from .verdict import Verdict

__all__ = ["CallShape", "Verdict", "check_selection", "distributions", "shapes"]
