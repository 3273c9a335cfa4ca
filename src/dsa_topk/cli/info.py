"""``dsa-topk info``: versions, GPUs, toolchain, caches, and which backend each kind of call would use, and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

PACKAGES = (
    *("torch", "apache-tvm-ffi", "cuda-pathfinder", "numpy", "safetensors", "flashinfer-python"),
    *("sglang-kernel", "sgl-kernel"),  # the same package by its new and its old name
)

_MEGABYTE = 1 << 20

#: One line each: the kinds of call that engines make.
CALLS = (
    ("decode", {"form": "paged"}),
    ("extend, ragged", {"form": "ragged"}),
    ("extend, paged", {"form": "paged"}),
    ("positions only", {"form": "positions"}),
    ("by score", {"form": "positions", "order": "score", "return_scores": True}),
    ("k = 8192", {"form": "positions", "k": 8192}),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("info")(info)


def info() -> None:
    """Print versions, GPUs, toolchain, caches, and which backend each kind of call would use, and why."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for title, rows in (
        ("versions", versions()),
        ("GPUs", gpus()),
        ("toolchain and cache", toolchain()),
        ("environment", environment()),
    ):
        console.print(f"\n[bold]{title}[/bold]")
        for name, value in rows:
            console.print(f"  {name:<18} {value}", markup=False)
    for device in devices():
        console.print()
        console.print(call_table(device))
    console.print("\n[bold]why[/bold]")
    for device in devices():
        console.print(indent(why(device)), markup=False)


def versions() -> Iterator[tuple[str, str]]:
    """Yield a line per package that matters."""
    from dsa_topk._version import __version__

    yield "dsa-topk", __version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def gpus() -> Iterator[tuple[str, str]]:
    """Yield a line per CUDA device, or one that says why there is none."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        yield "none", f"torch is built for CUDA {built} but sees no device" if built else "torch is built without CUDA"
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory = facts.total_memory / (1 << 30)
        yield (
            f"cuda:{index}",
            f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.multi_processor_count} SMs, {memory:.0f} GiB",
        )


def toolchain() -> Iterator[tuple[str, str]]:
    """Yield what the builder found: compiler, cache, builds."""
    if importlib.util.find_spec("dsa_topk.jit") is None:
        yield "builder", "not part of this installation"
        return
    from dsa_topk import jit

    found = jit.status()
    if found.nvcc is None:
        yield "nvcc", "not found: " + "; ".join(f"{where}: {what}" for where, what in found.tried)
    else:
        version = (found.nvcc_version or "version unknown").partition("|")[0].strip()
        yield "nvcc", f"{found.nvcc} ({version}; found by {found.nvcc_how})"
    if found.nvcc_problem:
        yield "nvcc problem", found.nvcc_problem
    yield "cache", str(found.cache_dir) + (f" (not used: {found.cache_problem})" if found.cache_problem else "")
    yield "content key", found.content_key or "none"
    for build in found.builds:
        state = "current" if build.current else "of other sources or versions"
        yield "cached build", f"{build.key}: {', '.join(build.archs)}, {build.size / _MEGABYTE:.1f} MiB, {state}"
    if not found.builds:
        yield "cached builds", "none"
    yield "compile on demand", "off (DSA_TOPK_DISABLE_JIT)" if found.disabled else "on"
    yield "kernels", kernels(found.reason)


def kernels(reason: str | None) -> str:
    """Say whether the kernels can run here; ``reason`` is why they cannot be had, and having them takes no GPU."""
    import torch

    if reason:
        return f"not usable: {reason}"
    return "usable" if torch.cuda.is_available() else "no GPU here to run them (a build is possible)"


def environment() -> Iterator[tuple[str, str]]:
    """Yield the DSA_TOPK_* variables that are set."""
    names = sorted(name for name in os.environ if name.startswith("DSA_TOPK_"))
    if not names:
        yield "DSA_TOPK_*", "none set"
    for name in names:
        yield name, os.environ[name]


def devices() -> list[str]:
    """Return the device types to explain: cuda where there is one, and cpu."""
    import torch

    return ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]


def call_table(device: str) -> Table:
    """Return the table of backends by kind of call and dtype."""
    import torch
    from rich.table import Table

    import dsa_topk

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    table = Table(title=f"backend of each kind of call, scores on {device}", title_justify="left")
    table.add_column("call")
    for dtype in dtypes:
        table.add_column(str(dtype).removeprefix("torch."))
    for name, kind in CALLS:
        chosen = [dsa_topk.explain(device=device, dtype=dtype, **kind).backend or "none" for dtype in dtypes]
        table.add_row(name, *chosen)
    return table


def why(device: str) -> str:
    """Return the registry's reasons for the commonest call, the paged form in fp32 with k = 2048."""
    import dsa_topk

    return str(dsa_topk.explain(form="paged", device=device))


def indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
