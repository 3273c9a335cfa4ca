"""Run compute-sanitizer's four tools over every kernel and path (tools/sanitize_driver.py).

    python tools/sanitize.py                        # all four
    python tools/sanitize.py --tool racecheck --limit 120

Exit code 0: no tool found an error; a machine that refuses a tool is reported as such and counts as no finding.
1: findings, a wrong result or a time-out. 2: compute-sanitizer is not installed, or wrong use.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
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


@dataclass(frozen=True)
class Outcome:
    """What one tool said. ``outcome``: clean, errors, wrong (results, without findings), timeout, refused, missing."""

    outcome: str
    seconds: float
    message: str
    launches: int = 0
    paths: dict[str, int] | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing was found; a machine that refuses the tool finds nothing, one without it has not looked."""
        return self.outcome in ("clean", "refused")


def find_tool() -> str | None:
    """The program, or None."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for folder in [*(f"{home}/bin" for home in homes), "/usr/local/cuda/bin"]:
        found = shutil.which("compute-sanitizer", path=folder)
        if found:
            return found
    return shutil.which("compute-sanitizer")


def command(program: str, tool: str, python: str) -> list[str]:
    """The command line of one tool."""
    words = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    if tool == "memcheck":
        words += ["--leak-check", "no"]
    brief = ["--brief"] if tool == "racecheck" else []  # many times slower than the others
    return [*words, python, str(DRIVER), *brief]


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
        return Outcome("timeout", seconds, f"stopped after {seconds:.0f} s", launches, paths)
    if refusal is not None and report is None:
        return Outcome("refused", seconds, refusal.removeprefix("=========").strip())
    if code == FOUND or (findings and int(findings[1]) > 0):
        first = next((line for line in said if line and "COMPUTE-SANITIZER" not in line), summary)
        return Outcome("errors", seconds, f"{summary or 'findings'}; first: {first}", launches, paths)
    if code != 0 or report is None:
        lines = [line for line in output.splitlines() if line.strip()]
        message = "; ".join(report["problems"]) if report and report["problems"] else "\n".join(lines[-5:])
        return Outcome("wrong", seconds, message or f"exit code {code}", launches, paths)
    return Outcome("clean", seconds, summary, launches, paths)


def run_tool(tool: str, *, limit: float, program: str | None = None, python: str = sys.executable) -> Outcome:
    """Run one tool, at most ``limit`` seconds."""
    program = program or find_tool()
    if program is None:
        return Outcome("missing", 0.0, "compute-sanitizer was not found")
    environment = dict(os.environ)
    if tool in ("memcheck", "initcheck"):
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # tensors are allocations of their own: their ends are seen
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command(program, tool, python),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        partial = error.stdout or b""
        code, output = None, partial.decode(errors="replace") if isinstance(partial, bytes) else partial
    except OSError as error:
        return Outcome("refused", time.perf_counter() - begin, f"{program}: {error}")
    return judge(code, output, round(time.perf_counter() - begin, 1))


def run_all(tools: Sequence[str] = TOOLS, *, limit: float = 90) -> dict[str, Outcome]:
    """Run several tools and print a line for each. A device that is refused once is not tried again."""
    outcomes: dict[str, Outcome] = {}
    for tool in tools:
        before = next((outcome for outcome in outcomes.values() if outcome.outcome in ("refused", "missing")), None)
        outcomes[tool] = before or run_tool(tool, limit=limit)
        outcome = outcomes[tool]
        print(f"{tool:10s} {outcome.outcome:8s} {outcome.seconds:6.1f} s  {outcome.message}", flush=True)
    return outcomes


def as_json(outcomes: dict[str, Outcome]) -> dict[str, dict[str, object]]:
    """The outcomes as the evidence file holds them, without what is empty."""
    return {
        tool: {name: value for name, value in asdict(outcome).items() if value not in (None, 0, "")}
        for tool, outcome in outcomes.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tools; see the module's text for the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one; may be given again")
    parser.add_argument("--limit", type=float, default=90, help="seconds for each tool (default 90)")
    options = parser.parse_args(arguments)
    outcomes = run_all(options.tool or TOOLS, limit=options.limit).values()
    if any(outcome.outcome == "missing" for outcome in outcomes):
        return 2
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
