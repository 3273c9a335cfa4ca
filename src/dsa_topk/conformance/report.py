"""What a run found, as a JSON file and as a table."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._files import write_json as write_json  # what the commands write a report with
from .runner import GOOD, STATUSES, Outcome

#: Upper ends of the length columns of the table.
BANDS = (2048, 8192, 16384, 65536, 131072)
BAND_NAMES = (*(f"<= {band}" for band in BANDS), f"> {BANDS[-1]}")

#: What a result file says that it is.
KINDS = ("dsa-topk check", "dsa-topk fuzz")


@dataclass(slots=True)
class Record:
    """One problem of a run."""

    case: str
    name: str
    length: int
    outcome: Outcome
    file: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "case": self.case,
            "name": self.name,
            "length": self.length,
            "replay": self.file,
            **self.outcome.to_dict(),
        }


@dataclass(slots=True)
class Report:
    """All problems of one backend."""

    backend: str
    mode: str
    note: str = ""  # why it did not run
    records: list[Record] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether any problem went wrong."""
        return any(not record.outcome.good for record in self.records)

    def counts(self) -> dict[str, int]:
        """Problems by status, in the order of :data:`~.runner.STATUSES`."""
        found = [record.outcome.status for record in self.records]
        return {status: found.count(status) for status in STATUSES if status in found}

    @property
    def rows(self) -> int:
        """Rows checked."""
        return sum(record.outcome.rows for record in self.records)

    def cells(self) -> dict[str, list[str]]:
        """For each case one text per length band: the table's body."""
        body: dict[str, list[list[Record]]] = {}
        for record in self.records:
            row = body.setdefault(record.case, [[] for _ in BAND_NAMES])
            row[sum(record.length > band for band in BANDS)].append(record)
        return {case: [cell(part) for part in row] for case, row in body.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "backend": self.backend,
            "mode": self.mode,
            "note": self.note,
            "problems": len(self.records),
            "rows": self.rows,
            "counts": self.counts(),
            "records": [record.to_dict() for record in self.records],
        }


def cell(records: Iterable[Record]) -> str:
    """One table cell: ``exact``, ``wrong 12/34`` (rows), ``invalid 3/34``, ``crash``, ``n/s`` (not supported) ..."""
    outcomes = [record.outcome for record in records]
    if not outcomes:
        return ""
    bad = [outcome for outcome in outcomes if not outcome.good]
    if bad:
        worst = max(bad, key=lambda outcome: STATUSES.index(outcome.status))
        rows = sum(outcome.bad_rows for outcome in bad)
        total = sum(outcome.rows for outcome in outcomes)
        return f"{worst.status} {rows}/{total}" if rows else worst.status
    if all(outcome.status != "exact" for outcome in outcomes):
        return "n/s" if any(outcome.status == "unsupported" for outcome in outcomes) else outcomes[0].status
    return "exact"


def environment(device: torch.device) -> dict[str, Any]:
    """Facts that a figure needs to be worth anything."""
    from dsa_topk import __version__

    facts: dict[str, Any] = {
        "dsa_topk": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "device": str(device),
    }
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = properties.name
        facts["multiprocessors"] = properties.multi_processor_count
        facts["cuda"] = torch.version.cuda
    return facts


def require_replaceable(path: Path) -> None:
    """Leave a user's file alone: asked before long work.

    Raises
    ------
    ValueError
        If something is at ``path`` that is neither empty nor a result of ``dsa-topk check`` or ``fuzz``.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError(f"{path}: is no file")
    try:
        text = path.read_text()
        content = json.loads(text) if text else {"kind": KINDS[0]}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("kind") not in KINDS:
        raise ValueError(f"{path}: exists and is no result of dsa-topk check or fuzz; it is left as it is")


def all_good(counts: dict[str, int]) -> bool:
    """Whether no status in ``counts`` is a failure."""
    return all(status in GOOD for status in counts)
