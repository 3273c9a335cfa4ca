"""Build gates without a GPU: every target compiles, nothing spills, no stack frame, registers within a written budget.

    python tools/gates.py                     # all targets
    python tools/gates.py --arch 90a          # one
    python tools/gates.py --suggest           # print a budget table made of what ptxas reports now

``tools/register_budget.json`` maps the start of a kernel's demangled name (without return type) to the most registers
it may use, or to ``{"sm_90a": 64, "*": 72}``. The longest matching start counts. A kernel without a budget and a budget
without a kernel both fail, so that the table cannot rot.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dsa_topk.jit import archs as arch_names
from dsa_topk.jit import compiler, source, toolchain
from dsa_topk.jit.errors import JitError

BUDGET = Path(__file__).resolve().parent / "register_budget.json"
PARALLEL = 2

Budget = Mapping[str, "int | Mapping[str, int]"]

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\w+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class Usage:
    """What ptxas says about one function on one target; ``registers`` is None for a function that is no kernel."""

    name: str
    arch: str
    registers: int | None = None
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0


def parse(output: str, arch: str) -> list[Usage]:
    """Read the report of ``ptxas -v``; names stay mangled."""
    functions: dict[str, Usage] = {}
    current = kernel = None
    for line in output.splitlines():
        if match := _ENTRY.search(line):
            kernel = functions.setdefault(match[1], Usage(match[1], match[2]))
        elif match := _PROPERTIES.search(line):
            current = functions.setdefault(match[1], Usage(match[1], kernel.arch if kernel else f"sm_{arch}"))
        elif (match := _FRAME.search(line)) and current is not None:
            current.stack, current.spill_stores, current.spill_loads = (int(text) for text in match.groups())
        elif (match := _USED.search(line)) and kernel is not None:
            kernel.registers = int(match[1])
            shared = _SHARED.search(line)
            kernel.shared = int(shared[1]) if shared else 0
    return list(functions.values())


def demangle(usages: Sequence[Usage], root: Path | None = None) -> None:
    """Replace mangled names by readable ones without return type."""
    tool = shutil.which("c++filt") or (root and shutil.which("cu++filt", path=str(root / "bin")))
    if not tool:
        raise JitError("neither c++filt nor cu++filt was found", hint="install binutils")
    text = "\n".join(usage.name for usage in usages)
    names = subprocess.run([tool], input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    for usage, name in zip(usages, names, strict=True):
        usage.name = name.removeprefix("void ").replace("(anonymous namespace)::", "")


def limit(name: str, arch: str, budget: Budget) -> tuple[str, int] | None:
    """The budget entry that counts for a kernel, and its number; None if there is none."""
    for start in sorted((start for start in budget if name.startswith(start)), key=len, reverse=True):
        value = budget[start]
        number = value if isinstance(value, int) else value.get(arch, value.get("*"))
        if number is not None:
            return start, number
    return None


def judge(usages: Sequence[Usage], budget: Budget) -> list[str]:
    """Every violation, one line each."""
    problems = []
    used = set()
    for usage in usages:
        where = f"{usage.arch} {usage.name}"
        if usage.spill_stores or usage.spill_loads:
            problems.append(f"{where}: spills {usage.spill_stores} bytes stored, {usage.spill_loads} bytes loaded")
        if usage.stack:
            problems.append(f"{where}: stack frame of {usage.stack} bytes")
        if usage.registers is None:
            continue
        found = limit(usage.name, usage.arch, budget)
        if found is None:
            problems.append(f"{where}: {usage.registers} registers and no budget")
            continue
        used.add(found[0])
        if usage.registers > found[1]:
            problems.append(f"{where}: {usage.registers} registers, the budget {found[0]!r} allows {found[1]}")
    problems += [f"budget {start!r} matches no kernel" for start in budget if start not in used]
    if not any(usage.registers is not None for usage in usages):
        problems.append("no kernel was compiled at all")
    return problems


def compile_for(arch: str, nvcc: Path, sources: source.Snapshot) -> tuple[list[Usage], float]:
    """Compile the device code for one target with the package's own flags and read ptxas' report."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dsa-topk-gates-") as name:
        folder = Path(name)
        for part in ("src", "tmp"):
            (folder / part).mkdir()
        sources.write_to(folder / "src")
        extra = ["-cubin", "-Xptxas=-v", "-o", str(folder / "out.cubin")]
        usages = []
        for unit in sources.units:
            words = compiler.command(nvcc, (arch,), (unit,), extra)
            usages += parse(compiler.execute(words, folder / "src", folder / "tmp"), arch)
    return usages, time.perf_counter() - begin


def suggest(usages: Sequence[Usage]) -> dict[str, int]:
    """A budget of what is used now: per kernel name, template arguments left out, the most over all targets."""
    table: dict[str, int] = {}
    for usage in usages:
        if usage.registers is not None:
            start = re.split(r"[<(]", usage.name, maxsplit=1)[0]
            table[start] = max(table.get(start, 0), usage.registers)
    return dict(sorted(table.items()))


def table(usages: Sequence[Usage], budget: Budget) -> str:
    """The report as plain text, the widest name last."""
    lines = ["arch      regs  budget  stack  spill  smem  kernel"]
    for usage in sorted(usages, key=lambda u: (u.name, u.arch)):
        found = limit(usage.name, usage.arch, budget)
        lines.append(
            f"{usage.arch:8s} {usage.registers if usage.registers is not None else '-':>5} "
            f"{found[1] if found and usage.registers is not None else '-':>7} {usage.stack:6d} "
            f"{usage.spill_stores + usage.spill_loads:6d} {usage.shared:5d}  {usage.name}"
        )
    return "\n".join(lines)


def read_budget(path: Path) -> dict[str, int | dict[str, int]]:
    """The table; ValueError if it is not a map from names to numbers or per-target maps."""
    data = json.loads(path.read_text())
    ok = isinstance(data, dict) and all(
        isinstance(v, int) or (isinstance(v, dict) and all(isinstance(n, int) for n in v.values()))
        for v in data.values()
    )
    if not ok:
        raise ValueError(f'{path}: expected {{"kernel name": registers, ...}}')
    return data


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gates: 0 if all hold, 1 if one does not, 2 if they could not be run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", default=",".join(arch_names.TARGETS), help="targets, e.g. 80,90a")
    parser.add_argument("--budget", type=Path, default=BUDGET)
    parser.add_argument("--source", type=Path, default=source.CSRC, help="folder with the sources")
    parser.add_argument("--unit", default=source.UNIT)
    parser.add_argument("--suggest", action="store_true", help="print a budget made of what is used now")
    options = parser.parse_args(arguments)
    try:
        names = arch_names.parse(options.arch)
        sources = source.snapshot(options.source, options.unit)
        budget = {} if options.suggest else read_budget(options.budget)
        found = toolchain.search().nvcc
        if found is None:
            raise JitError("no nvcc", hint=toolchain.NO_NVCC_HINT)
        nvcc = found.path
        root = toolchain.toolkit_root(nvcc)
    except (OSError, ValueError, JitError) as error:
        print(f"gates: {error}", file=sys.stderr)
        return 2
    usages: list[Usage] = []
    try:
        with ThreadPoolExecutor(PARALLEL) as pool:
            for name, (part, seconds) in zip(
                names, pool.map(lambda arch: compile_for(arch, nvcc, sources), names), strict=True
            ):
                print(f"sm_{name}: {len(part)} function(s) in {seconds:.1f} s", file=sys.stderr)
                usages += part
        demangle(usages, root)
    except JitError as error:
        print(f"gates: {error}", file=sys.stderr)
        return 1
    if options.suggest:
        print(json.dumps(suggest(usages), indent=2))
        return 0
    print(table(usages, budget))
    problems = judge(usages, budget)
    for problem in problems:
        print(f"FAILED {problem}")
    print(f"gates: {len(problems)} problem(s), {len(names)} target(s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
