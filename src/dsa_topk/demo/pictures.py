"""The demo's two pictures: what a selection is worth (coverage.png) and which positions it took (selection.png)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dsa_topk.demo.batch import Request
from dsa_topk.io import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dsa_topk.demo.run import Result

#: Name, label, colour (dark to light, so that print without colour keeps the order), line style and marker of each
#: line.
LINES = (
    ("best", "k of top mass", "#000000", "--", "s"),
    ("indexer", "indexer's top-k", "#0072B2", "-", "o"),
    ("latest", "latest k tokens", "#D55E00", ":", "^"),
)

#: What the demo's files say about who made them: only such files are replaced unasked.
MADE_BY = "dsa-topk demo"

MODEL = "model all-MiniLM-L6-v2, one attention layer"

_BINS = 160


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def _save(figure: Figure, path: Path) -> Path:
    with atomic_path(path, force=True) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": MADE_BY})
    return path


def coverage(result: Result, path: Path, title: str) -> Path:
    """Draw attention mass and output error over k and write the picture; ``title`` names the text or the scores."""
    figure = _figure(9, 4)
    left, right = figure.subplots(1, 2)
    compared = [item.comparison for item in result.selections if item.comparison.rows]
    ks = [item.k for item in compared]
    for name, _, colour, style, marker in LINES if ks else ():
        for axes, field, scale in ((left, "mass", 100.0), (right, "error", 1.0)):
            values = [scale * getattr(getattr(item, name), field) for item in compared]
            axes.plot(ks, values, style, marker=marker, color=colour, markersize=5, clip_on=False)
    for axes, field, scale in ((left, "mass", 100.0), (right, "error", 1.0)):
        _label_lines(axes, compared, ks, field, scale)
        axes.set_xlabel("k, tokens selected per row")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        if ks:
            axes.set_xscale("log", base=2)
            axes.set_xticks(ks, labels=[str(k) for k in ks], minor=False)
            axes.set_xlim(min(ks) * 0.85, max(ks) * 2.9)  # room for the labels at the lines' ends
    left.set_ylim(0, 100)
    left.set_title("softmax attention mass kept, %", loc="left", fontsize=10)
    right.set_ylim(0, 1.1 * _largest_error(compared) or 1)
    right.set_title("relative error of the attention output", loc="left", fontsize=10)
    if not ks:
        for axes in (left, right):
            axes.set_xticks([])
            axes.text(0.05, 0.5, "no row has more candidates than k", transform=axes.transAxes)
    figure.suptitle("Attention on the selected tokens against dense attention", x=0.01, ha="left", fontsize=12)
    _name_source(figure, title)
    return _save(figure, path)


def _name_source(figure: Figure, title: str) -> None:
    """Say below the picture what it was made from. The text is data: a dollar sign in a file name is no formula."""
    text = title if len(title) <= 110 else f"{title[:109]}\u2026"
    figure.supxlabel(f"{MODEL}; {text}", x=0.01, ha="left", fontsize=7, color="0.35", parse_math=False)


def _label_lines(axes: Axes, compared: list[Any], ks: list[int], field: str, scale: float) -> None:
    """Name each line at its right end, moved apart where two ends are close."""
    if not ks:
        return
    ends = sorted(
        (scale * getattr(getattr(compared[-1], name), field), label, colour) for name, label, colour, _, _ in LINES
    )
    top = 100.0 if field == "mass" else _largest_error(compared)
    previous = -0.02 * top  # so that a line that ends at zero has its name above the axis
    for value, label, colour in ends:
        height = max(value, previous + 0.06 * top)
        axes.annotate(
            label,
            (ks[-1], value),
            xytext=(ks[-1] * 1.12, height),
            textcoords="data",
            color=colour,
            va="center",
            fontsize=9,
        )
        previous = height


def _largest_error(compared: list[Any]) -> float:
    return max((getattr(item, line[0]).error for item in compared for line in LINES), default=0.0)


def selection(result: Result, path: Path, title: str) -> Path:
    """Draw where the longest request's new tokens' selected positions lie, for each k, and write the picture.

    ``title`` names the text or the scores.
    """
    index = max(range(len(result.batch.requests)), key=lambda item: result.batch.requests[item].tokens)
    request, rows = result.batch.requests[index], result.batch.rows_of(index)
    count = len(result.selections)
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    figure = _figure(9, 1.0 + 1.7 * count)
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    image = None
    for axes, item in zip(panels, result.selections, strict=True):
        share, size = binned(item.positions[rows], request)
        image = axes.imshow(
            share.numpy(),
            cmap="Greys",
            norm=PowerNorm(0.5, vmin=0, vmax=1),  # selections are thin: without it a share of a tenth is invisible
            aspect="auto",
            interpolation="nearest",
            extent=(0, share.shape[1] * size, request.tokens, request.tokens - request.new),
        )
        first = request.tokens - request.new
        axes.plot((first + 1, request.tokens + 1), (first, request.tokens), color="#D55E00", linewidth=1)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(0, request.tokens * 1.005)
        axes.set_ylabel("new token")
        axes.set_title(f"k = {item.k}", loc="left", fontsize=10)
    size = binned_size(request)
    panels[-1].set_xlabel(
        f"position in the request's context, {size} per column (right of the slanted line: the future)"
    )
    if image is not None:
        bar = figure.colorbar(image, ax=list(panels), fraction=0.03, pad=0.01)
        bar.set_label("share selected")
    figure.suptitle(
        f"Positions selected for the {request.new} new tokens of the longest request ({request.tokens} tokens)",
        x=0.01,
        ha="left",
        fontsize=12,
    )
    _name_source(figure, title)
    return _save(figure, path)


def binned_size(request: Request) -> int:
    """Return how many positions share one column of the picture."""
    return max(1, -(-request.tokens // _BINS))


def binned(positions: torch.Tensor, request: Request) -> tuple[torch.Tensor, int]:
    """Count selected positions in columns of equal width.

    Returns
    -------
    share : torch.Tensor
        ``[rows, columns]``, 0 to 1.
    size : int
        Positions per column.
    """
    size = binned_size(request)
    columns = -(-request.tokens // size)
    share = torch.zeros(positions.shape[0], columns)
    valid = positions >= 0
    share.scatter_add_(1, positions.clamp_min(0).long() // size, valid.float())
    return share / size, size
