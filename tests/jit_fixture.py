"""Shared by the jit tests: a toolkit whose "nvcc" runs g++ on a tiny unit, and a driver for other processes.

The fake compiles in about 0.1 s and notes every run, so "built exactly once" can be counted; sources, links and loads
are real. Tests that must see the real nvcc say so.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dsa_topk import jit
from dsa_topk.jit import core, source, toolchain
from dsa_topk.jit.core import Finder  # the class itself: tests replace the names that the package looks up

REAL = toolchain.search().nvcc
needs_nvcc = pytest.mark.skipif(REAL is None, reason="no nvcc on this machine")

SRC = Path(source.__file__).resolve().parents[2]

UNIT = """\
#include <tvm/ffi/c_api.h>
#include "answer.cuh"
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_answer(
    void*, const TVMFFIAny*, int32_t, TVMFFIAny* ret) {
  ret->type_index = kTVMFFIInt;
  ret->v_int64 = ANSWER;
  return 0;
}
"""

NVCC = """\
#!/bin/sh
# Stands in for nvcc: same questions, same -o, -I, -L, -l; the work is done by g++.
home=$(dirname "$(dirname "$0")")
case "$1" in
--version) cat "$home/version"; exit 0 ;;
--dryrun) echo "#\\$ _HERE_=$home/bin" >&2; exit 0 ;;
esac
echo run >> "$home/runs"
keep=
for word in "$@"; do
  case "$word" in
  -gencode=*|-Xcompiler=*|-cudart=*|--threads=*|-lineinfo) ;;
  *) keep="$keep $word" ;;
  esac
done
[ -f "$home/hook" ] && . "$home/hook"
exec g++ -x c++ -fPIC $keep
"""


class Workshop:
    """A fake toolkit, sources, cache and temporary folder below one test folder; environment set by the fixture."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.toolkit = home / "toolkit"
        self.sources = home / "csrc"
        self.cache = home / "cache"
        self.temporary = home / "tmp"
        for folder in (self.toolkit / "bin", self.sources, self.temporary):
            folder.mkdir(parents=True)
        nvcc = self.toolkit / "bin" / "nvcc"
        nvcc.write_text(NVCC)
        nvcc.chmod(0o755)
        self.set_version("13.0")
        (self.sources / "module.cu").write_text(UNIT)
        self.set_answer(42)

    def set_version(self, release: str) -> None:
        text = f"nvcc: fake\nCuda compilation tools, release {release}, V{release}.1\nBuild fake_{release}\n"
        (self.toolkit / "version").write_text(text)

    def set_answer(self, value: int) -> None:
        (self.sources / "answer.cuh").write_text(f"#define ANSWER {value}\n")

    def hook(self, shell: str) -> None:
        """Shell code that the fake nvcc runs before it compiles."""
        (self.toolkit / "hook").write_text(shell)

    def environment(self) -> dict[str, str]:
        return {
            "CUDA_HOME": str(self.toolkit),
            "DSA_TOPK_CACHE_DIR": str(self.cache),
            "TMPDIR": str(self.temporary),
        }

    def finder(self) -> Finder:
        return Finder(self.sources, aot=self.home / "aot")

    def build(self, *archs: str) -> jit.Build:
        found = jit.obtain(archs or ("90a",), finder=self.finder())
        assert found is not None
        return found

    def runs(self) -> int:
        """How often the compiler ran."""
        try:
            return len((self.toolkit / "runs").read_text().split())
        except FileNotFoundError:
            return 0

    def entries(self, folder: Path | None = None) -> list[str]:
        folder = folder or self.cache
        return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))

    def leftovers(self) -> list[str]:
        """Everything unfinished in the cache."""
        if not self.cache.is_dir():
            return []
        return sorted(p.name for p in self.cache.iterdir() if p.name.startswith((".staging-", ".partial-")))

    def start(self, code: str = "", **env: str) -> subprocess.Popen[str]:
        """Another process that builds for 90a and prints the outcome as JSON; ``code`` runs before it builds.

        The package is entered below its ``__init__`` so that no torch import hides the races.
        """
        script = f"""
import json, os, sys, types
package = types.ModuleType("dsa_topk")
package.__path__ = [{str(SRC / "dsa_topk")!r}]
sys.modules["dsa_topk"] = package
from pathlib import Path
from dsa_topk import jit
from dsa_topk.jit import core, store
{textwrap.dedent(code)}
try:
    found = jit.obtain(("90a",), finder=jit.Finder(Path({str(self.sources)!r}), aot=Path({str(self.home / "aot")!r})))
    print(json.dumps({{"path": str(found.path), "how": found.how}}))
except jit.JitError as error:
    print(json.dumps({{"error": str(error)}}))
"""
        return subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, **self.environment(), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def outcome(process: subprocess.Popen[str]) -> dict[str, str]:
    """The JSON line of a process that :meth:`Workshop.start` started."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


def answer(path: Path | str) -> int:
    """Load a module and ask it."""
    import tvm_ffi

    return int(tvm_ffi.load_module(str(path)).answer())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """A fresh workshop that this process builds in: environment set, memory of earlier builds and warnings gone."""
    made = Workshop(tmp_path)
    for name in ("CUDA_PATH", "DSA_TOPK_CUDA_ARCHS", "DSA_TOPK_DISABLE_JIT", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(made.temporary))
    monkeypatch.setattr(core, "_warned", set())
    monkeypatch.setattr(jit, "_modules", {})
    monkeypatch.setattr(jit, "_reasons", {})
    return made


def use_real_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the machine's own nvcc in the place of the workshop's."""
    assert REAL is not None
    monkeypatch.setenv("CUDA_HOME", str(REAL.path.parent.parent))
