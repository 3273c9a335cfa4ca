"""Run the GPU tests, and if asked the sanitizers, and write what came of it to tests/results/<gpu>.json.

    python tools/gpu_evidence.py                          # pytest -m gpu, file named after the GPU
    python tools/gpu_evidence.py --sanitize --out result.json -- -k graphs
    python tools/gpu_evidence.py --add-sanitizers         # to the file of an earlier run of the same code
    python tools/gpu_evidence.py --keep-sanitizers FILE   # the tests again, with what FILE says of the same code

Words behind ``--`` go to pytest; the file then says that it holds a part of the tests. The file ties the outcome to the
code by the content hash of src/dsa_topk; tests/test_evidence.py compares that with the tree. Exit code 0: all that ran
is right; 1: it is not; 2: there is no GPU, or wrong use.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsa_topk._evidence import content_hash
from dsa_topk._files import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "results"
OUTCOMES = ("passed", "failed", "error")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
TEXTS = (
    "outcome",
    "commit",
    "content_hash",
    "gpu",
    "driver",
    "cuda",
    "torch",
    "tvm_ffi",
    "nvcc",
    "python",
    "command",
    "date",
)
COUNTS = ("passed", "failed", "errors", "skipped")


def read_junit(path: Path) -> dict[str, Any]:
    """Counts, names and recorded measurements of a junit file.

    Raises
    ------
    ValueError
        The file is missing or no junit file.
    """
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ValueError(f"{path}: no junit file ({error})") from error
    passed, failed, errors, skipped = 0, [], [], {}
    measured: dict[str, float] = {}
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        for entry in case.iter("property"):
            measured[str(entry.get("name"))] = float(entry.get("value", "nan"))
        if case.find("failure") is not None:
            failed.append(name)
        elif case.find("error") is not None:
            errors.append(name)
        elif (skip := case.find("skipped")) is not None:
            skipped[name] = str(skip.get("message"))
        else:
            passed += 1
    return {
        "counts": {"passed": passed, "failed": len(failed), "errors": len(errors), "skipped": len(skipped)},
        "failed": [*failed, *errors],
        "skipped": skipped,
        "measured": measured,
    }


def run_tests(more: Sequence[str], *, limit: float) -> dict[str, Any]:
    """Run ``pytest -m gpu`` in a process of its own; its output goes to ours."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dsa-topk-gpu-") as folder:
        junit = Path(folder) / "junit.xml"
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={junit}",
            *more,
        ]
        try:
            code = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        try:
            found = read_junit(junit)
        except ValueError:
            what = (
                f"stopped after {limit:.0f} s"
                if code == -1
                else f"pytest ended with exit code {code}, without a report"
            )
            found = {"counts": dict.fromkeys(COUNTS, 0), "failed": [what], "skipped": {}, "measured": {}}
    counts = found["counts"]
    # Nothing that passed is no success: a wrong marker expression would look like one.
    right = code == 0 and not counts["failed"] and not counts["errors"] and counts["passed"] > 0
    found["outcome"] = "passed" if right else "failed" if counts["failed"] else "error"
    found["seconds"] = round(time.perf_counter() - begin, 1)
    return found


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _nvcc() -> str:
    from dsa_topk.jit import toolchain

    found = toolchain.search().nvcc
    if found is None:
        return "none"
    match = re.search(r"release [\d.]+, (V[\d.]+)", _output(str(found.path), "--version"))
    return match[1] if match else "unknown"


def _commit() -> str:
    if named := os.environ.get("DSA_TOPK_COMMIT"):
        return named
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("-dirty" if _output("git", "-C", str(ROOT), "status", "--porcelain", "--", "src", "tests") else "")


def _tvm_ffi() -> str:
    try:
        return importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def describe(command: Sequence[str]) -> dict[str, str]:
    """Which code, on which machine, with which versions."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "commit": _commit(),
        "content_hash": content_hash(),
        "gpu": torch.cuda.get_device_name(0),
        "gpus": str(torch.cuda.device_count()),
        "driver": driver.splitlines()[0] if driver else "unknown",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "tvm_ffi": _tvm_ffi(),
        "nvcc": _nvcc(),
        "python": platform.python_version(),
        "command": " ".join(command),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def slug(gpu: str) -> str:
    """File name of a GPU's evidence: ``NVIDIA H200`` becomes ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def problems(data: object) -> list[str]:
    """What is wrong with the content of an evidence file; empty if it is well formed and agrees with itself."""
    if not isinstance(data, Mapping):
        return ["not an object"]
    found = [f"{name}: expected text" for name in TEXTS if not isinstance(data.get(name), str) or not data[name]]
    counts = data.get("counts")
    if not isinstance(counts, Mapping) or any(type(counts.get(n)) is not int or counts[n] < 0 for n in COUNTS):
        return [*found, f"counts: expected numbers {', '.join(COUNTS)}"]
    if data.get("outcome") not in OUTCOMES:
        found.append(f"outcome: expected one of {', '.join(OUTCOMES)}, got {data.get('outcome')!r}")
    bad = counts["failed"] + counts["errors"]
    if data.get("outcome") == "passed" and (bad or not counts["passed"] or data.get("failed")):
        found.append("outcome: 'passed' disagrees with the counts")
    if not isinstance(data.get("failed"), list) or len(data["failed"]) < bad:
        found.append("failed: expected the name of each failed test")
    if not isinstance(data.get("skipped"), Mapping) or len(data["skipped"]) != counts["skipped"]:
        found.append("skipped: expected the name and reason of each skipped test")
    if not re.fullmatch(r"[0-9a-f]{64}", str(data.get("content_hash"))):
        found.append("content_hash: expected 64 hexadecimal digits")
    sanitizers = data.get("sanitizers", {})
    for tool in SANITIZERS if sanitizers else ():
        entry = sanitizers.get(tool) if isinstance(sanitizers, Mapping) else None
        found += [f"sanitizers: expected an outcome of {name}" for name in _without_outcome(tool, entry)]
    return found


def _without_outcome(name: str, entry: object) -> list[str]:
    """The names of what lacks its outcome: a tool, or groups of its launches."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("outcome"), str):
        return [name]
    groups = entry.get("groups", {})
    if not isinstance(groups, Mapping):
        return [name]
    return [lacking for group, part in groups.items() for lacking in _without_outcome(f"{name} {group}", part)]


def shortcomings(data: Mapping[str, Any], tree: str) -> list[str]:
    """Why well-formed evidence does not speak for the code with the content hash ``tree``; empty if it does."""
    found = []
    if data["content_hash"] != tree:
        found.append(f"out of date: made from src/dsa_topk {data['content_hash'][:12]}, the tree is {tree[:12]}")
    if data["outcome"] != "passed":
        found.append(f"outcome {data['outcome']}: {', '.join(data['failed'][:5])}")
    if data.get("partial"):
        found.append("holds a part of the tests only")
    sanitizers = data.get("sanitizers")
    if not sanitizers:
        found.append("the sanitizers were not run")
    else:
        for tool in _bad(sanitizers):
            groups = _bad(sanitizers[tool].get("groups", {}))
            found.append(f"{tool}: {sanitizers[tool]['outcome']}" + (f" ({', '.join(groups)})" if groups else ""))
    return found


def _bad(entries: Mapping[str, Any]) -> list[str]:
    """The names of entries with findings, or that did not look to the end."""
    return [name for name, entry in entries.items() if entry["outcome"] in ("errors", "wrong", "timeout", "missing")]


def read_same_code(path: Path, tree: str) -> dict[str, Any]:
    """The evidence at ``path``, to add sanitizers to: ValueError unless it is well formed and of the same code."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no evidence to add to ({error})") from error
    if found := problems(data):
        raise ValueError(f"{path}: {'; '.join(found)}")
    if data["content_hash"] != tree:
        raise ValueError(f"{path}: made from other code ({data['content_hash'][:12]}, the tree is {tree[:12]})")
    return dict(data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, and say where; see the module's text for the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    ours, _, more = (
        (given[: given.index("--")], "--", given[given.index("--") + 1 :]) if "--" in given else (given, "", [])
    )
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to write (default: tests/results/<gpu>.json)")
    parser.add_argument("--sanitize", action="store_true", help="also run compute-sanitizer's four tools")
    parser.add_argument("--limit", type=float, default=480, help="seconds for the tests (default 480)")
    parser.add_argument("--tool-limit", type=float, default=150, help="seconds for each sanitizer (default 150)")
    parser.add_argument(
        "--add-sanitizers", action="store_true", help="run no tests: add the sanitizers to the file of the same code"
    )
    parser.add_argument(
        "--keep-sanitizers", type=Path, help="an earlier file of the same code whose sanitizers are not run again"
    )
    options = parser.parse_args(ours)
    if options.keep_sanitizers and (options.sanitize or options.add_sanitizers):
        parser.error("--keep-sanitizers: the sanitizers are either kept or run")
    if not torch.cuda.is_available():
        print("gpu_evidence: no CUDA GPU here (torch.cuda.is_available() is False)", file=sys.stderr)
        return 2
    header = describe([Path(sys.executable).name, "tools/gpu_evidence.py", *given])
    path = options.out or RESULTS / f"{slug(header['gpu'])}.json"
    data: dict[str, Any] = {}
    try:
        if options.add_sanitizers:
            data = read_same_code(path, header["content_hash"])
        elif options.keep_sanitizers:
            data = read_same_code(options.keep_sanitizers, header["content_hash"])
            if not data.get("sanitizers"):
                raise ValueError(f"{options.keep_sanitizers}: no sanitizers to keep")
    except ValueError as error:
        print(f"gpu_evidence: {error}", file=sys.stderr)
        return 2
    if not options.add_sanitizers:
        kept = {"sanitizers": data["sanitizers"], "sanitized": data.get("sanitized", data["date"])} if data else {}
        tests = run_tests(more, limit=options.limit)
        data = {"outcome": tests.pop("outcome"), **header, "partial": bool(more), **tests, **kept}
        write_json(path, data)  # now, so that a sanitizer that takes the machine down does not take this along
    sanitizing = options.sanitize or options.add_sanitizers
    if sanitizing:
        import sanitize

        outcomes = sanitize.run_all(limit=options.tool_limit)
        data["sanitizers"] = sanitize.as_json(outcomes)
        data["sanitized"] = header["date"]
        write_json(path, data)
    counts = ", ".join(f"{data['counts'][name]} {name}" for name in COUNTS)
    print(f"gpu_evidence: {data['outcome']} ({counts}) in {data['seconds']} s -> {path}")
    clean = not sanitizing or all(outcome.ok for outcome in outcomes.values())
    return 0 if data["outcome"] == "passed" and clean else 1


if __name__ == "__main__":
    sys.exit(main())
