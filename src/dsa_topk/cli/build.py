"""``dsa-topk build``: fill the build cache ahead of time, on a machine with nvcc and without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("build")(build)


def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch", help="Targets, e.g. 90a or 80,90a,100,120. Default: DSA_TOPK_CUDA_ARCHS, else the GPU's."
        ),
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option("--cache-dir", help="Folder to fill. Default: DSA_TOPK_CACHE_DIR or ~/.cache/dsa-topk."),
    ] = None,
    clean_stale: Annotated[
        bool, typer.Option("--clean-stale", help="First remove what killed builds and damaged entries left behind.")
    ] = False,
) -> None:
    """Compile the CUDA module into the cache (needs nvcc, no GPU)."""
    from rich.console import Console
    from rich.table import Table

    from dsa_topk import jit
    from dsa_topk.cli import CliError
    from dsa_topk.jit import archs as arch_names
    from dsa_topk.jit import core
    from dsa_topk.jit.store import STALE_STAGING_S, Store

    console, errors = Console(soft_wrap=True, highlight=False), Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        targets = arch_names.parse(arch) if arch else (core.configured_archs() or _device_target())
    except ValueError as error:
        # The parser names its own argument; here it is the option.
        text = str(error)
        raise CliError(f"--arch:{text.removeprefix('archs:')}" if text.startswith("archs:") else text) from None
    if clean_stale:
        # Builds that are still running keep their young staging folders.
        removed = Store(cache_dir or core.cache_dir()).clean(STALE_STAGING_S, 0.0)
        console.print(f"removed {len(removed)} stale item(s)")
    try:
        with errors.status(f"building for {', '.join(targets)} ..."):
            done = core.obtain(targets, cache=cache_dir)
    except (jit.JitError, OSError) as error:
        errors.print(f"dsa-topk: {error}", style="red", markup=False)  # with its command and log: not one line
        raise typer.Exit(1) from None
    assert done is not None  # obtain() returns None only when it may not compile
    table = Table("what", "value", title="dsa-topk build")
    for name, value in (
        ("targets", ", ".join(done.archs)),
        ("outcome", done.how),
        ("key", done.key),
        ("path", str(done.path)),
        ("size", f"{done.path.stat().st_size / 1024:.0f} KiB"),
        ("seconds", f"{done.seconds:.2f}"),
    ):
        table.add_row(name, value)
    console.print(table)


def _device_target() -> tuple[str, ...]:
    import torch

    from dsa_topk.jit import archs as arch_names

    if not torch.cuda.is_available():
        raise ValueError(
            "--arch: expected a target such as 90a, since there is no GPU to ask and no DSA_TOPK_CUDA_ARCHS"
        )
    return (arch_names.native(torch.cuda.get_device_capability()),)
