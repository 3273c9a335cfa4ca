"""The result file: header and rows as JSON, written atomically after every case, taken up again where it stopped."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._evidence import content_hash
from .._files import write_text
from .cases import Case

# Equal in both files, or the rows of the older one say nothing about the newer code and machine.
IDENTITY = ("content_hash", "gpu", "driver", "cuda", "torch")


@dataclass
class Row:
    """One timed case. ``peers`` and ``floor_us`` are of the same interleaved run as ``us``."""

    case: Case
    us: float
    spread: float
    floor_us: float | None
    peers: dict[str, float]
    checked: bool
    # What the checker, or the peer itself, said: an inexact peer is timed all the same, one that raised is not.
    peer_failures: dict[str, str] = field(default_factory=dict)
    # Our own call in other modes (tie_break="largest", order="score", ...), where the suite asks for them.
    variants: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The row as the file holds it."""
        data: dict[str, Any] = {
            **asdict(self.case),
            "us": round(self.us, 3),
            "spread": round(self.spread, 4),
            "floor_us": None if self.floor_us is None else round(self.floor_us, 3),
            "peers": {name: round(us, 3) for name, us in self.peers.items()},
            "checked": self.checked,
        }
        if self.peer_failures:
            data["peer_failures"] = self.peer_failures
        if self.variants:
            data["variants"] = {name: round(us, 3) for name, us in self.variants.items()}
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Row:
        """Inverse of :meth:`to_json`."""
        names = ("mode", "rows", "width", "k", "dtype", "dist", "regime")
        return Row(
            Case(*(data[name] for name in names)),
            data["us"],
            data["spread"],
            data["floor_us"],
            dict(data["peers"]),
            data["checked"],
            dict(data.get("peer_failures", {})),
            dict(data.get("variants", {})),
        )

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """Name and time of the fastest peer."""
        return min(self.peers.items(), key=lambda item: item[1]) if self.peers else None

    @property
    def floor_ratio(self) -> float | None:
        """Our time over the floor's."""
        return None if not self.floor_us else self.us / self.floor_us

    @property
    def speedup(self) -> float | None:
        """The best peer's time over ours."""
        best = self.best_peer
        return None if best is None else best[1] / self.us

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes of the windows over our time, in 1e9 bytes per second."""
        return self.case.window_bytes / self.us / 1e3


@dataclass
class Record:
    """A whole result file."""

    header: dict[str, str]
    rows: dict[Case, Row] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)  # host time of an eager call, by form
    notes: dict[str, str] = field(default_factory=dict)  # a line about each peer

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.values())

    def add(self, row: Row) -> None:
        """Add a row, or replace the one of the same case."""
        self.rows[row.case] = row

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        data: dict[str, Any] = {"header": self.header, "rows": [row.to_json() for row in self]}
        if self.host_us:
            data["host_us"] = {name: round(us, 2) for name, us in self.host_us.items()}
        if self.notes:
            data["notes"] = self.notes
        return data

    def save(self, path: Path) -> None:
        """Write atomically: a reader, or a run cut short, finds the old file or the new one."""
        # A row per line: readable, and differences between two files are differences of rows.
        content = self.to_json()
        lines = ",\n".join("  " + json.dumps(row) for row in content.pop("rows"))
        head = json.dumps(content, indent=1)[:-2]
        write_text(path, f'{head},\n "rows": [\n{lines}\n ]\n}}\n')


def load(path: Path) -> Record:
    """Read a result file.

    Raises
    ------
    ValueError
        When it is not one.
    """
    try:
        data = json.loads(path.read_text())
        rows = [Row.from_json(row) for row in data["rows"]]
        header = data["header"]
        if missing := [name for name in (*IDENTITY, "commit", "command", "date") if not isinstance(header[name], str)]:
            raise TypeError(f"header entries {missing} are not text")
        return Record(header, {row.case: row for row in rows}, data.get("host_us", {}), data.get("notes", {}))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a benchmark result file ({type(error).__name__}: {error})") from error


def resume(path: Path | None, fresh: dict[str, str]) -> tuple[Record, str]:
    """The record to add to, and a line that says what happened to an existing file.

    Its rows are kept when code and machine are the same; else the file is set aside as ``NAME.previous.json``.
    """
    if path is None or not path.exists():
        return Record(fresh), ""
    try:
        old = load(path)
        different = [name for name in IDENTITY if old.header.get(name) != fresh.get(name)]
    except ValueError as error:
        old, different = Record({}), [str(error)]
    if not different:
        old.header = fresh
        return old, f"{path}: {len(old.rows)} finished rows kept"
    aside = path.with_suffix(".previous.json")
    os.replace(path, aside)
    return Record(fresh), f"{path}: set aside as {aside.name} (differs in {', '.join(different)})"


def make_header(device: torch.device, command: Sequence[str]) -> dict[str, str]:
    """Where and with what a run happens."""
    cuda = device.type == "cuda"
    return {
        "commit": _commit(),
        "content_hash": content_hash(),
        "gpu": torch.cuda.get_device_name(device) if cuda else f"none (CPU {platform.machine()})",
        "driver": _driver() if cuda else "none",
        "cuda": str(torch.version.cuda or "none"),
        "torch": torch.__version__,
        "command": " ".join(command),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _commit() -> str:
    """The checkout's commit; DSA_TOPK_COMMIT names it where the tree travels without its repository."""
    if named := os.environ.get("DSA_TOPK_COMMIT"):
        return named
    here = str(Path(__file__).resolve().parent)
    commit = _output("git", "-C", here, "rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("-dirty" if _output("git", "-C", here, "status", "--porcelain", "--", here) else "")


def _driver() -> str:
    version = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return version.splitlines()[0] if version else "unknown"
