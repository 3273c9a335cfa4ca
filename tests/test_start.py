"""An interrupt while the command starts, when torch is still being imported (dsa_topk/_start.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_topk.io import write_tensors

SCRIPT = "import sys\nfrom dsa_topk.cli import main\nsys.exit(main())\n"  # what installers write
# As C code that imports does: another error for the interrupt.
SLOW_TORCH = """
import time
try:
    print("importing", flush=True)
    time.sleep({seconds})
except KeyboardInterrupt:
    raise ImportError("no torch") from None
raise SystemExit(7)
"""


def start(command: list[str], folder: Path, *, seconds: float, ignore: bool = False) -> subprocess.Popen[str]:
    """Start a program whose ``import torch`` takes its time, and wait until it is in there."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(SLOW_TORCH.format(seconds=seconds))
    before: Callable[[], object] = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before if ignore else None,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    return process


@pytest.mark.parametrize("command", [["dsa-topk", "info"], ["./dsa-topk", "--help"], ["-m", "dsa_topk.cli", "info"]])
def test_an_interrupted_start_is_quiet(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "dsa-topk").write_text(SCRIPT)
    with start(command, tmp_path, seconds=60) as process:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error == "dsa-topk: interrupted\n"


@pytest.mark.parametrize("command", [["other.py"], ["-c", "import dsa_topk"], ["-m", "other", "dsa-topk"]])
def test_other_programs_are_interrupted_as_ever(tmp_path: Path, command: list[str]) -> None:
    """A library leaves the interrupt to whoever imports it."""
    (tmp_path / "other.py").write_text("import dsa_topk\n")
    with start(command, tmp_path, seconds=60) as process:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "ImportError: no torch" in error


def test_in_the_background_interrupts_stay_ignored(tmp_path: Path) -> None:
    (tmp_path / "dsa-topk").write_text(SCRIPT)
    with start(["dsa-topk", "info"], tmp_path, seconds=1, ignore=True) as process:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 7


def test_a_command_that_has_begun_cleans_up(tmp_path: Path) -> None:
    """From then on an interrupt unwinds the stack again: the half-written file goes."""
    (tmp_path / "dsa-topk").write_text(
        "import sys, time\n"
        "from dsa_topk.cli import main\n"
        "import safetensors.torch as s\n"
        "def slow(tensors, path, metadata=None):\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "s.save_file = slow\n"
        "sys.exit(main())\n"
    )
    import torch

    write_tensors(tmp_path / "in.npz", {"scores": torch.ones(2, 4)})
    words = ["dsa-topk", "select", "in.npz", "-o", "out.safetensors", "--k", "2"]
    with subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error == "dsa-topk: interrupted\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dsa-topk", "in.npz"]
