"""One launch of every kernel at a shape it is made for, for Nsight Compute; and the table of what that says.

    ncu --clock-control none -k 'regex:(filter|resident|split|order)_kernel' --csv --page raw \
        --section SpeedOfLight --section WarpStateStats --section SchedulerStats --section Occupancy \
        --section MemoryWorkloadAnalysis --section LaunchStats python tools/profile_kernels.py > ncu.csv
    python tools/profile_kernels.py --table ncu.csv    # Markdown, for docs/kernel-notes.md

Needs a GPU and a machine that lets ncu read its counters. Scores are normal, k = 2048, float32, at the end bfloat16;
decode goes through a page table of 64 scores a page, prefill is ragged with windows that grow from half to full.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

# Kernel, blocks a row, rows, width.
LAUNCHES = (
    ("Row128", 1, 4096, 8192),
    ("Row128Deep", 1, 4096, 32768),
    ("Row256Light", 1, 4096, 65536),
    ("Row256", 1, 4096, 131072),
    ("Row512", 1, 1024, 131072),
    ("Cluster512", 16, 4, 131072),
    ("Held4K", 1, 64, 4096),
    ("Held8K", 1, 64, 8192),
    ("Held16K", 1, 64, 16384),
    ("Held16KTwin", 1, 256, 16384),
    ("Held32K", 1, 64, 32768),
    ("Split512", 16, 1, 131072),
    ("Split512", 2, 64, 131072),
    ("Whole512", 1, 256, 65536),
    ("Whole1024", 1, 128, 131072),
    ("Spread512", 16, 1, 131072),
)
LAUNCHES_16 = (("Row128Deep", 1, 1024, 32768), ("Row128Deep", 1, 4096, 32768), ("Row256", 1, 4096, 65536))  # bfloat16
# Column of the table: metric of ncu's raw page.
METRICS = {
    "us": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "warps an SM": "sm__warps_active.avg.per_cycle_active",
    "waves": "launch__waves_per_multiprocessor",
    "issue slots busy %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "DRAM %": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "L1 and shared %": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "bank reads %": "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
}
STALLS = "smsp__average_warps_issue_stalled_"


def run() -> None:
    """Launch each once; with order="score" a last time, for the kernel that sorts."""
    import torch

    from dsa_topk import _plan, topk_paged, topk_positions, topk_ragged
    from dsa_topk.backends import cuda

    k = 2048

    def launch(kernel: str, cluster: int, rows: int, width: int, dtype: torch.dtype) -> None:
        scores = torch.randn(rows, width, device="cuda").to(dtype)
        plan = _plan.choose(rows, width, k, cuda._load(0)[1], element_bytes=dtype.itemsize)
        with cuda.use_plan(_plan.Plan(kernel, cluster, plan.margin, plan.prefetch if kernel.startswith("Row") else 0)):
            if kernel.startswith("Row"):
                lengths = (width // 2 + torch.arange(rows, device="cuda") * (width // 2) // rows).int()
                topk_ragged(scores, lengths, k, out_offsets=torch.zeros_like(lengths), backend="cuda")
            else:
                table = torch.randperm(width // 64, device="cuda").int().expand(rows, -1)
                lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
                topk_paged(scores, lengths, k, page_table=table, page_size=64, backend="cuda")

    for launched in LAUNCHES:
        launch(*launched, torch.float32)
    topk_positions(torch.randn(64, 8192, device="cuda"), None, k, order="score", backend="cuda")
    for launched in LAUNCHES_16:
        launch(*launched, torch.bfloat16)
    torch.cuda.synchronize()


def table(path: Path) -> str:
    """Markdown: a row a launch, what the warps wait for in the last column (cycles of every issue)."""
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    rows = list(csv.DictReader(lines[first:]))[1:]  # the first holds the units
    labels = [f"{kernel} / {cluster}, {n} x {width}" for kernel, cluster, n, width in LAUNCHES]
    labels += ["Held8K, 64 x 8192 (positions)", "order, 64 x 2048"]
    labels += [f"{kernel} / {cluster}, {n} x {width}, bfloat16" for kernel, cluster, n, width in LAUNCHES_16]
    out = ["| launch | " + " | ".join(METRICS) + " | warps wait for |", "|---" * (len(METRICS) + 2) + "|"]
    for label, row in zip(labels, rows, strict=True):
        stalls = {
            name.removeprefix(STALLS).split("_per_")[0].removesuffix("_not_issued"): float(value or 0)
            for name, value in row.items()
            if name.startswith(STALLS) and name.endswith("_per_issue_active.ratio")
        }
        worst = sorted(stalls.items(), key=lambda item: -item[1])[:4]
        cells = [shorten(row.get(metric, ""), 1e-3 if unit == "us" else 1.0) for unit, metric in METRICS.items()]
        out.append(f"| {label} | " + " | ".join(cells) + " | " + ", ".join(f"{n} {v:.1f}" for n, v in worst) + " |")
    return "\n".join(out)


def shorten(text: str, scale: float) -> str:
    """A figure of ncu's, scaled (its times are nanoseconds), with three digits."""
    try:
        value = float(text.replace(",", "")) * scale
    except ValueError:
        return text or "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--table"]:
        print(table(Path(sys.argv[2])))
    else:
        run()
