"""Pictures of a result file: latency and bandwidth over length, speed-up over the best peer by batch and length.

Readable in black and white (line styles, markers and direct labels carry what colour does) and by colour-blind readers
(Okabe and Ito's palette; the heat map runs from orange to purple through white, with its numbers printed).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .record import Row
from .session import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


End = tuple[float, float, str, str]  # x and y of a line's right end, its label, its colour


@dataclass(frozen=True)
class Style:
    """How one contestant is drawn, and what a reader who does not know our short names calls it."""

    colour: str
    line: str | tuple[int, tuple[int, ...]]  # matplotlib's dash tuple: offset, lengths of dashes and gaps
    marker: str
    label: str = ""


STYLES = {
    OURS: Style("#0072B2", "-", "o", OURS),
    "sgl_v2": Style("#D55E00", "--", "s", "SGLang v2"),
    "sgl_fast": Style("#000000", "--", "<", "sgl-kernel"),
    "ds_fp32": Style("#009E73", "-.", "^", "DeepSelect"),
    "ds_bf16": Style("#009E73", "-.", "v", "DeepSelect"),
    "fi_native": Style("#E69F00", (0, (1, 2)), "v", "FlashInfer"),
    "fi_det": Style("#CC79A7", ":", "D", "FlashInfer det."),
    "fi_tieS": Style("#56B4E9", (0, (3, 1, 1, 1)), "P", "FlashInfer tie small"),
    "fi_tieL": Style("#000000", (0, (1, 1)), "X", "FlashInfer tie large"),
    "torch": Style("#000000", ":", "x", "torch.topk"),
}
OTHER = Style("#56B4E9", (0, (3, 1, 1, 1)), "P")
FLOOR_COLOUR = "#777777"
LINES_AT_MOST = 4  # contestants in a panel: more cannot be told apart without colour
BANDWIDTH_ROWS = {1, 4, 16, 64, 256, 1024, 4096, 8192}
# The modes that are drawn: how their figures are called, and the batch sizes that get a panel.
PANELS = {
    "decode": ("decode", (1, 16, 64, 256)),
    "mtp": ("mtp", (4, 16, 64, 256)),
    "ragged": ("prefill", (1024, 4096, 8192)),
    "packed": ("packed", (1024, 4096, 8192)),
}


def label_of(name: str) -> str:
    """What the pictures call a contestant."""
    return STYLES.get(name, OTHER).label or name


def names(rows: Sequence[Row]) -> list[str]:
    """Stems of the figures that :func:`draw` makes of these rows."""
    return [f"{kind}-{name}" for name, _, some in _groups(rows) for kind in _kinds(some)]


def draw(rows: Sequence[Row], folder: Path, header: Mapping[str, str]) -> list[Path]:
    """Draw what the rows allow, as SVG and PNG.

    Parameters
    ----------
    rows : sequence of Row
        Any rows; each figure takes those it speaks of.
    folder : Path
        Where to write; made if need be.
    header : mapping
        The record's header: the GPU's name goes into the titles.

    Returns
    -------
    list of Path
        The files written.
    """
    written: list[Path] = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, batches, some in _groups(rows):
        title = f"{name.replace('-', ', ')}, float32, k = 2048, {header.get('gpu', '')}"
        for kind in _kinds(some):
            figure = latency(some, title, batches) if kind == "latency" else _DRAWINGS[kind](some, title)
            written += _save(figure, folder / f"{kind}-{name}")
    return written


def _groups(rows: Sequence[Row]) -> list[tuple[str, Sequence[int], list[Row]]]:
    """Name, batch sizes of the panels and rows of each group of figures."""
    plain = [r for r in rows if r.case.dist == "normal" and r.case.dtype == "float32" and r.case.k == 2048]
    groups: list[tuple[str, Sequence[int], list[Row]]] = []
    for mode, (name, batches) in PANELS.items():
        for regime in ("cold", "warm"):
            some = [row for row in plain if row.case.mode == mode and row.case.regime == regime]
            if len({row.case.width for row in some}) > 1:  # a line needs two points
                groups.append((f"{name}-{regime}", batches, some))
    return groups


def _kinds(rows: Sequence[Row]) -> list[str]:
    return ["latency", "bandwidth", *(["speedup"] if any(row.speedup for row in rows) else [])]


def _figure(columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot: no global state, no display, and figures are freed with their last reference.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False, sharey=True)
    return figure, list(axes[0])


def _save(figure: Figure, stem: Path) -> list[Path]:
    import matplotlib

    paths = [stem.with_name(stem.name + suffix) for suffix in (".svg", ".png")]
    # Fixed ids and no date: the same figures give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "dsa-topk", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=150, metadata={"Software": ""})
    return paths


def length_label(columns: float) -> str:
    """4096 -> 4K, 1048576 -> 1M."""
    if columns >= 1 << 20:
        return f"{columns / (1 << 20):g}M"
    return f"{columns / 1024:g}K" if columns >= 1024 else f"{columns:g}"


def _length_axis(axis: Axes, widths: Iterable[int], room: float) -> None:
    ticks = sorted(set(widths))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [length_label(tick) for tick in ticks])
    axis.minorticks_off()
    for label in axis.get_xticklabels():
        label.set_rotation(45 if len(ticks) > 6 else 0)
    axis.set_xlim(ticks[0] / 1.15, ticks[-1] * (ticks[-1] / ticks[0]) ** room)  # room for the labels at the right


def _plain_numbers(value: float, _position: int = 0) -> str:
    return f"{value:g}"


def _log_values(axis: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    # About the same number of figures at the axis whether it spans three decades or less than one.
    steps = (1.0, 2.0, 5.0) if high / low > 20 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.yaxis.set_major_locator(LogLocator(base=10, subs=steps))
    axis.yaxis.set_major_formatter(FuncFormatter(_plain_numbers))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _direct_labels(axis: Axes, ends: list[End]) -> None:
    """Name lines at their right ends, pushed apart where they would overlap."""
    low, high = axis.get_ylim()
    height = axis.get_window_extent().height or 300.0
    gap = (high / low) ** (13 / height)  # about a line of text
    placed: list[float] = []
    for x, y, text, colour in sorted(ends, key=lambda end: end[1]):
        at = max(y, placed[-1] * gap) if placed else y
        placed.append(at)
        axis.annotate(
            text,
            (x, y),
            (x * 1.12, at),
            color="#222222",  # pale colours are hard to read as text; the line beside it has the colour
            fontweight="bold" if text == OURS else "normal",
            fontsize=8,
            va="center",
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},  # a line may run below it
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5} if at > y * 1.02 else None,
        )


def _shown_peers(rows: Sequence[Row]) -> list[str]:
    """The peers worth a line: those that are the best somewhere first, then by how often they took part."""
    wins: dict[str, int] = {}
    for row in rows:
        for name in row.peers:
            best = row.best_peer
            wins[name] = wins.get(name, 0) + 1 + (1000 if best is not None and best[0] == name else 0)
    return sorted(wins, key=lambda name: -wins[name])[: LINES_AT_MOST - 1]


def latency(rows: Sequence[Row], title: str, batches: Sequence[int]) -> Figure:
    """Time over length, a panel per batch size, with peers and the read floor."""
    present = sorted({row.case.rows for row in rows})
    wanted = [batch for batch in batches if batch in present] or present[:4]
    figure, axes = _figure(len(wanted), 3.4 * len(wanted) + 0.6, 4.0)
    names = _shown_peers(rows)
    labels: list[list[End]] = []
    bottom = 0.6 * min(min(row.floor_us or row.us, row.us) for row in rows if row.case.rows in wanted)
    for axis, batch in zip(axes, wanted, strict=True):
        chosen = sorted((row for row in rows if row.case.rows == batch), key=lambda row: row.case.width)
        ends: list[End] = []
        for name in [*names, OURS]:
            points = [
                (r.case.width, r.us if name == OURS else r.peers[name])
                for r in chosen
                if name == OURS or name in r.peers
            ]
            if points:
                style = STYLES.get(name, OTHER)
                _line(axis, points, style, heavy=name == OURS)
                ends.append((*points[-1], label_of(name), style.colour))
        floor = [(row.case.width, row.floor_us) for row in chosen if row.floor_us]
        if floor:
            axis.plot(*zip(*floor, strict=True), color=FLOOR_COLOUR, linewidth=1.0)
            ends.append((floor[-1][0], floor[-1][1], "read floor", FLOOR_COLOUR))
        _log_values(axis)
        _length_axis(axis, [row.case.width for row in chosen], room=0.5)
        if floor:
            widths, lowest = [width for width, _ in floor], [us for _, us in floor]
            axis.fill_between(widths, lowest, bottom, color="#eeeeee", zorder=0)
        axis.set_title(f"{batch} row{'s' if batch > 1 else ''}", fontsize=10)
        axis.set_xlabel("length (columns)")
        labels.append(ends)
    axes[0].set_ylabel("time per call (us)")
    axes[0].set_ylim(bottom=bottom)
    figure.suptitle(f"Top-k selection: {title}", fontsize=11)
    figure.canvas.draw()  # the panels' sizes and shared limits are known only now
    for axis, ends in zip(axes, labels, strict=True):
        _direct_labels(axis, ends)
    return figure


def _line(axis: Axes, points: Sequence[tuple[float, float]], style: Style, *, heavy: bool) -> None:
    axis.plot(
        *zip(*points, strict=True),
        color=style.colour,
        linestyle=style.line,
        marker=style.marker,
        markersize=5 if heavy else 4,
        markerfacecolor=style.colour if heavy else "white",
        linewidth=2.2 if heavy else 1.3,
        zorder=4 if heavy else 3,
    )


def bandwidth(rows: Sequence[Row], title: str) -> Figure:
    """Bytes of the windows per second over length, a line per batch size; the floor of each dashed beside it."""
    present = {row.case.rows for row in rows}
    # Every second batch of the decode suite: the others lie between them and make the labels collide.
    rows = [row for row in rows if row.case.rows in BANDWIDTH_ROWS] if present & BANDWIDTH_ROWS else rows
    figure, (axis,) = _figure(1, 7.2, 4.6)
    markers = "osD^vPX*"
    ends: list[End] = []
    batches = sorted({row.case.rows for row in rows})
    for number, batch in enumerate(batches):
        chosen = sorted((row for row in rows if row.case.rows == batch), key=lambda row: row.case.width)
        # Batches are ordered: one hue from light to dark says so, in grey as well.
        shade = 0.75 - 0.75 * number / max(len(batches) - 1, 1)
        colour = (0.75 * shade, 0.2 + 0.6 * shade, 0.45 + 0.5 * shade)
        points = [(row.case.width, row.gigabytes_per_second) for row in chosen]
        _line(axis, points, Style(colour, "-", markers[number % len(markers)]), heavy=True)  # type: ignore[arg-type]
        ends.append((*points[-1], f"{batch} row{'s' if batch > 1 else ''}", "#222222"))
        floor = [(row.case.width, row.case.window_bytes / row.floor_us / 1e3) for row in chosen if row.floor_us]
        if floor:
            # The same hue and marker, so that each floor is seen to belong to its line.
            axis.plot(
                *zip(*floor, strict=True),
                color=colour,
                linewidth=0.9,
                linestyle=(0, (4, 2)),
                marker=markers[number % len(markers)],
                markersize=4,
                markerfacecolor="white",
                zorder=2,
            )
    _log_values(axis)
    _length_axis(axis, [row.case.width for row in rows], room=0.16)
    axis.set_xlabel("length (columns)")
    axis.set_ylabel("bytes of the windows per second (GB/s)")
    axis.set_title(f"Bandwidth: {title}\n(dashed, hollow markers: the read floor of the same rows)", fontsize=10)
    figure.canvas.draw()
    _direct_labels(axis, ends)
    return figure


def speedup(rows: Sequence[Row], title: str) -> Figure:
    """Best peer's time over ours, batch by length, as a heat map with its numbers."""
    import math

    figure, (axis,) = _figure(1, 7.2, 0.45 * len({row.case.rows for row in rows}) + 2.2)
    widths = sorted({row.case.width for row in rows})
    batches = sorted({row.case.rows for row in rows})
    values: dict[tuple[int, int], float] = {
        (row.case.rows, row.case.width): row.speedup for row in rows if row.speedup is not None
    }
    # Symmetric on the log scale, so that 2 and 1/2 are equally far from white.
    grid: list[list[float]] = [[math.log2(values.get((b, w), math.nan)) for w in widths] for b in batches]
    limit = max(1.0, *(abs(value) for line in grid for value in line if not math.isnan(value)))
    cells: Any = axis.imshow(grid, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto", origin="lower")
    axis.patch.set(facecolor="white", hatch="xx", edgecolor="#bbbbbb")  # not measured: must not look like a ratio of 1
    for (batch, width), value in values.items():
        strong = abs(math.log2(value)) > 0.62 * limit
        axis.text(
            widths.index(width),
            batches.index(batch),
            f"{value:.2f}",
            ha="center",
            va="center",
            fontsize=9,
            color="white" if strong else "black",
            fontweight="bold" if value < 0.97 else "normal",
        )
    axis.set_xticks(range(len(widths)), [length_label(width) for width in widths])
    axis.set_yticks(range(len(batches)), [str(batch) for batch in batches])
    axis.set_xlabel("length (columns)")
    axis.set_ylabel("rows")
    axis.set_title(
        f"Best peer's time over ours: {title}\n(above 1: dsa-topk is faster; bold: slower by over 3%)", fontsize=10
    )
    bar = figure.colorbar(cells, ax=axis)
    ticks = [t for t in (-2, -1, 0, 1, 2, 3) if abs(t) <= limit]
    bar.set_ticks(ticks, labels=[f"{2.0**t:g}" for t in ticks])
    bar.set_label("slower \u2190  as fast as the best peer  \u2192 faster", fontsize=8)
    return figure


_DRAWINGS = {"bandwidth": bandwidth, "speedup": speedup}
