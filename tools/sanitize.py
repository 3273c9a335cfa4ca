"""Run compute-sanitizer's four tools over our kernels (tools/sanitize_driver.py), in groups.

    python tools/sanitize.py                        # all four
    python tools/sanitize.py --tool racecheck --limit 200
    python tools/sanitize.py --tool racecheck --group clusters-16

Each group of launches is a process with a time limit of its own, so that one that hangs or dies costs only itself; a
tool's outcome is the worst of its groups, and each group's is recorded beside it. Exit code 0: no tool found an error;
a machine that refuses a tool is reported as such and counts as no finding. 1: findings, a wrong result or a time-out.
2: compute-sanitizer is not installed, or wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

DRIVER = Path(__file__).resolve().with_name("sanitize_driver.py")
FOUND = 99  # exit code that the sanitizer gives when it has findings
# What it says where it cannot work at all. A finding never reads like this.
REFUSALS = (
    "Device not supported",
    "Internal Sanitizer Error",
    "not supported on this",
    "Unable to find injection library",
    "Insufficient privileges",
    "insufficient permissions",
    "No attachable process found",
    "Target application terminated before first instrumented API call",
)
# Worst first. "absent": the device or the build has nothing of this kind to launch.
SEVERITY = ("errors", "wrong", "timeout", "missing", "refused", "clean", "absent")
FINE = ("clean", "refused", "absent")


@dataclass(frozen=True)
class Group:
    """Launches that share a process: what the driver is told, which kernels the tool looks at, and its limit."""

    name: str  # of the driver's groups
    kernel: str = ""  # part of the kernels' names; empty = all kernels, torch's too
    limit: float = 90.0  # seconds


LIMIT = 150  # seconds for a tool: racecheck needs about half of it where nothing hangs

# racecheck keeps track of every access to shared memory: it gets few launches, one kernel a process, what is most
# likely to hang (the largest clusters) last. The others are fast enough to see everything in one process.
PLAN: dict[str, tuple[Group, ...]] = {
    "memcheck": (Group("all"), Group("hostile")),
    "racecheck": (
        Group("rows", "filter_kernel", 30),
        Group("clusters-2", "filter_kernel", 25),
        Group("clusters-3", "filter_kernel", 25),
        Group("resident", "resident_kernel", 25),
        Group("whole", "split_kernel", 25),
        Group("spread", "split_kernel", 25),
        Group("split-2", "split_kernel", 25),
        Group("split-3", "split_kernel", 25),
        Group("order", "order_kernel", 20),
        Group("split-16", "split_kernel", 70),
        Group("clusters-16", "filter_kernel", 70),
    ),
    "initcheck": (Group("all"),),
    "synccheck": (Group("all"),),
}
TOOLS = tuple(PLAN)


@dataclass(frozen=True)
class Outcome:
    """What one tool said. ``outcome``: one of `SEVERITY`; wrong means results, without findings of the tool."""

    outcome: str
    seconds: float
    message: str
    launches: int = 0
    paths: dict[str, int] | None = None
    groups: dict[str, Outcome] | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing was found; a machine that refuses the tool finds nothing, one without it has not looked."""
        return self.outcome in FINE


def find_tool() -> str | None:
    """The program, or None."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for folder in [*(f"{home}/bin" for home in homes), "/usr/local/cuda/bin"]:
        found = shutil.which("compute-sanitizer", path=folder)
        if found:
            return found
    return shutil.which("compute-sanitizer")


def command(program: str, tool: str, group: Group, python: str) -> list[str]:
    """The command line of one group of a tool."""
    words = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    if tool == "memcheck":
        words += ["--leak-check", "no"]
    if group.kernel:
        words += ["--kernel-name", f"kns={group.kernel}"]
    return [*words, python, str(DRIVER), group.name]


def judge(code: int | None, output: str, seconds: float) -> Outcome:
    """Read what a run has left: ``code`` is None when it was stopped at its limit."""
    report = None
    for line in output.splitlines():
        if line.startswith('{"launches"'):
            report = json.loads(line)
    launches, paths = (report["launches"], report["paths"]) if report else (0, None)
    said = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    summary = next((line for line in reversed(said) if "SUMMARY" in line), "")
    refusal = next((line for line in output.splitlines() if any(text in line for text in REFUSALS)), None)
    findings = re.search(r"(\d+) (?:errors?|hazards?)", summary)
    if code is None:
        begun = [line for line in output.splitlines() if line.startswith("launch ")]
        where = f" in {begun[-1]}" if begun else ""
        return Outcome("timeout", seconds, f"stopped after {seconds:.0f} s{where}", launches or len(begun), paths)
    if refusal is not None and report is None:
        return Outcome("refused", seconds, refusal.removeprefix("=========").strip())
    if code == FOUND or (findings and int(findings[1]) > 0):
        first = next((line for line in said if line and "COMPUTE-SANITIZER" not in line), summary)
        return Outcome("errors", seconds, f"{summary or 'findings'}; first: {first}", launches, paths)
    if code != 0 or report is None:
        lines = [line for line in output.splitlines() if line.strip()]
        message = "; ".join(report["problems"]) if report and report["problems"] else "\n".join(lines[-5:])
        return Outcome("wrong", seconds, message or f"exit code {code}", launches, paths)
    if report.get("absent"):
        return Outcome("absent", seconds, report["absent"])
    return Outcome("clean", seconds, summary, launches, paths)


def run_group(tool: str, group: Group, *, limit: float, program: str, python: str = sys.executable) -> Outcome:
    """Run one group of a tool, at most ``limit`` seconds."""
    environment = dict(os.environ)
    if tool in ("memcheck", "initcheck"):
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # tensors are allocations of their own: their ends are seen
    begin = time.perf_counter()
    try:
        process = subprocess.Popen(
            command(program, tool, group, python),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Outcome("refused", time.perf_counter() - begin, f"{program}: {error}")
    code: int | None = None
    try:
        output, _ = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        _end(process)
        output, _ = process.communicate()
    except BaseException:
        _end(process)
        raise
    return judge(code, output, round(time.perf_counter() - begin, 1))


def _end(process: subprocess.Popen[str]) -> None:
    """End the sanitizer and the program under it, which would go on alone and hold the device."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def merge(groups: Mapping[str, Outcome]) -> Outcome:
    """The outcome of a tool from those of its groups: the worst one, with the sums of what was launched."""
    if len(groups) == 1:
        return next(iter(groups.values()))
    worst = min((outcome.outcome for outcome in groups.values()), key=SEVERITY.index)
    said = [
        outcome.message if worst == "clean" else f"{name}: {outcome.message}"
        for name, outcome in groups.items()
        if outcome.outcome == worst
    ]
    paths: dict[str, int] = {}
    for outcome in groups.values():
        for path, count in (outcome.paths or {}).items():
            paths[path] = paths.get(path, 0) + count
    return Outcome(
        worst,
        round(sum(outcome.seconds for outcome in groups.values()), 1),
        "; ".join(dict.fromkeys(said)),
        sum(outcome.launches for outcome in groups.values()),
        paths or None,
        dict(groups),
    )


def run_tool(
    tool: str, *, limit: float, only: str | None = None, program: str | None = None, python: str = sys.executable
) -> Outcome:
    """Run the groups of one tool, at most ``limit`` seconds together; ``only`` names one of them."""
    program = program or find_tool()
    if program is None:
        return Outcome("missing", 0.0, "compute-sanitizer was not found")
    end = time.perf_counter() + limit
    groups: dict[str, Outcome] = {}
    for group in PLAN[tool]:
        if only not in (None, group.name):
            continue
        left = end - time.perf_counter()
        if left < min(2.0, limit / 2):
            groups[group.name] = Outcome("timeout", 0.0, "not begun: the tool's time was spent")
            continue
        outcome = run_group(tool, group, limit=min(left, group.limit), program=program, python=python)
        groups[group.name] = outcome
        if outcome.outcome == "refused":
            break  # the machine's answer, whatever is launched
    return merge(groups)


def run_all(tools: Sequence[str] = TOOLS, *, limit: float = LIMIT, only: str | None = None) -> dict[str, Outcome]:
    """Run several tools and print a line for each and its groups. A device that is refused once is not tried again."""
    outcomes: dict[str, Outcome] = {}
    for tool in tools:
        before = next((outcome for outcome in outcomes.values() if outcome.outcome in ("refused", "missing")), None)
        outcome = outcomes[tool] = before or run_tool(tool, limit=limit, only=only)
        _print_line(tool, outcome)
        for name, part in (outcome.groups or {}).items():
            _print_line(f"  {name}", part)
    return outcomes


def _print_line(name: str, outcome: Outcome) -> None:
    launched = f"{outcome.launches:4d} launches" if outcome.launches else " " * 13
    print(f"{name:14s} {outcome.outcome:8s} {outcome.seconds:6.1f} s  {launched}  {outcome.message}", flush=True)


def as_json(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, object]]:
    """The outcomes as the evidence file holds them, without what is empty."""
    found: dict[str, dict[str, object]] = {}
    for tool, outcome in outcomes.items():
        found[tool] = {name: value for name, value in asdict(outcome).items() if value not in (None, 0, "")}
        if outcome.groups:
            found[tool]["groups"] = as_json(outcome.groups)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tools; see the module's text for the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one; may be given again")
    parser.add_argument("--group", choices=sorted({group.name for groups in PLAN.values() for group in groups}))
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds for each tool (default {LIMIT})")
    options = parser.parse_args(arguments)
    tools = options.tool or [
        tool for tool in TOOLS if options.group is None or options.group in {group.name for group in PLAN[tool]}
    ]
    for tool in tools:
        if options.group is not None and options.group not in {group.name for group in PLAN[tool]}:
            parser.error(f"{tool} has no group {options.group!r}, only {', '.join(g.name for g in PLAN[tool])}")
    outcomes = run_all(tools, limit=options.limit, only=options.group).values()
    if any(outcome.outcome == "missing" for outcome in outcomes):
        return 2
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
