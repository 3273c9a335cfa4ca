"""What the real flashinfer and sgl_kernel packages did on a GPU, written to tests/results/packages/<gpu>.json.

    python3 tools/peers/package_evidence.py --out result.json      # tools/peers/carry_packages.sh brings the packages

Three parts: the tests that need the packages (test_peer_packages.py and the equivalence cases); the quick suite of
``dsa-topk check`` on each package for as long as --check-limit allows (a suite that is cut short says how far it came);
``dsa-topk bench --suite smoke --peers auto``, which has to find the packages by itself. Faults of a peer in the suite
are results, not failures of ours. Exit code 0: the tests passed and the benchmark timed the packages; 1: not; 2: there
is no GPU, or a package is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsa_topk._files import write_json

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gpu_evidence  # noqa: E402  # a script beside this folder, not a package

TESTS = ("tests/test_peer_packages.py", "tests/test_backends_equivalence.py")
DISTRIBUTIONS = ("flashinfer-python", "sglang-kernel", "sgl-kernel")
# The packages as `dsa-topk check` knows them, then with only the calls that their documents allow.
BACKENDS = ("flashinfer", "sgl-kernel", *(f"tools.peers.check_adapters:{name}" for name in ("fi_native", "sgl_fast")))
PEERS = ("fi_native", "fi_det", "fi_tieS", "fi_tieL", "sgl_fast")  # of the benchmark, served by the packages
_PROBLEM_S = 20.0  # after that a call counts as hanging


def versions() -> dict[str, str]:
    """Installed peers by distribution name."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def tally(messages: Iterable[Mapping[str, Any]], total: int, deadline: float) -> dict[str, Any]:
    """Count the outcomes of a suite's messages until its end or ``deadline`` (of `time.monotonic`).

    Returns
    -------
    dict
        ``problems`` tried of ``total``, ``counts`` by status, and ``faults``: by case, name, status and reason of the
        first fault.
    """
    counts: dict[str, int] = {}
    faults: dict[str, dict[str, str]] = {}
    begun: Mapping[str, Any] = {}
    for message in messages:
        if message["event"] == "begin":
            begun = message
        else:
            status, reason = message["outcome"]["status"], message["outcome"]["reason"]
            counts[status] = counts.get(status, 0) + 1
            if status not in ("exact", "unsupported", "skipped", "unavailable"):
                fault = {"name": begun["name"], "status": status, "reason": reason[:200]}
                faults.setdefault(begun["case"], fault)
        if time.monotonic() > deadline:
            break
    return {"problems": sum(counts.values()), "of": total, "counts": counts, "faults": faults}


def check(backend: str, limit: float) -> dict[str, Any]:
    """Run the quick suite on a backend for at most ``limit`` seconds, without shrinking or storing what fails."""
    from dsa_topk.conformance import isolate, suite

    begin = time.monotonic()
    total = len(suite.specs("quick", torch.device("cuda", 0)))
    config = {"backend": backend, "suite": "quick", "device": "cuda:0", "judge": None}
    messages = isolate.run_suite(config, _PROBLEM_S)
    try:
        found = tally(messages, total, begin + limit)
    except isolate.WorkerError as error:
        found = {"problems": 0, "of": total, "counts": {}, "faults": {}, "error": str(error)}
    finally:
        messages.close()  # type: ignore[attr-defined]  # a generator: ends its worker
    return {"backend": backend, **found, "seconds": round(time.monotonic() - begin, 1)}


def check_all(limit: float) -> list[dict[str, Any]]:
    """All backends side by side: they wait for their processes most of the time, and nothing is timed here."""
    found: dict[str, dict[str, Any]] = {}

    def run(backend: str) -> None:
        found[backend] = check(backend, limit)

    threads = [threading.Thread(target=run, args=(backend,)) for backend in BACKENDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[backend] for backend in BACKENDS if backend in found]


def bench(limit: float) -> dict[str, Any]:
    """Run the smoke suite with every peer that is found, and say what it said of those that the packages serve."""
    with tempfile.TemporaryDirectory(prefix="dsa-topk-packages-") as folder:
        path = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "dsa_topk.bench", "--suite", "smoke", "--peers", "auto", "--json", str(path)]
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=limit, capture_output=True, text=True, check=False)
            code, text = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            code, text = 124, ""
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {"exit_code": code, **summary(rows), **({} if code == 0 else {"output": text[-2000:]})}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """From the rows of a benchmark: in how many cases each peer was timed, and what went wrong with which."""
    timed = {name: sum(name in row["peers"] for row in rows) for name in PEERS}
    failures = {
        f"{row['mode']} {row['rows']} x {row['width']} {row['dtype']}: {name}": reason
        for row in rows
        for name, reason in row.get("peer_failures", {}).items()
        if name in PEERS
    }
    return {"cases": len(rows), "timed": timed, "failures": failures}


def good(data: Mapping[str, Any]) -> bool:
    """Whether the tests passed and the benchmark timed all of the packages' peers without a failure."""
    found = data["bench"]
    return bool(
        data["outcome"] == "passed"
        and found["exit_code"] == 0
        and all(found["timed"][name] for name in PEERS)
        and not found["failures"]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the three parts and write what came of them; see the module's text for the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to write (default: tests/results/packages/<gpu>.json)")
    parser.add_argument("--test-limit", type=float, default=150, help="seconds for the tests (default 150)")
    parser.add_argument("--check-limit", type=float, default=45, help="seconds for the quick suite (default 45)")
    parser.add_argument("--bench-limit", type=float, default=60, help="seconds for the benchmark (default 60)")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if not torch.cuda.is_available():
        print("package_evidence: no CUDA GPU here", file=sys.stderr)
        return 2
    packages = versions()
    if "flashinfer-python" not in packages or not {"sglang-kernel", "sgl-kernel"} & set(packages):
        print(f"package_evidence: flashinfer-python and sglang-kernel are needed; found {packages}", file=sys.stderr)
        return 2
    header = gpu_evidence.describe([Path(sys.executable).name, "tools/peers/package_evidence.py", *given])
    path = options.out or gpu_evidence.RESULTS / "packages" / f"{gpu_evidence.slug(header['gpu'])}.json"
    tests = gpu_evidence.run_tests([*TESTS, "-k", "peer_packages or real_backends"], limit=options.test_limit)
    data: dict[str, Any] = {"outcome": tests.pop("outcome"), "packages": packages, **header, "partial": True, **tests}
    data["bench"] = bench(options.bench_limit)
    data["checks"] = check_all(options.check_limit)  # last: a peer that takes the device down takes nothing along
    write_json(path, data)
    print(f"package_evidence: tests {data['outcome']}, {data['counts']}")
    for name in data["failed"]:
        print(f"  failed: {name}")
    print(f"package_evidence: bench {data['bench']}")
    for found in data["checks"]:
        print(f"package_evidence: {found['backend']}: {found['problems']} of {found['of']}: {found['counts']}")
    print(f"package_evidence: -> {path}")
    return 0 if good(data) else 1


if __name__ == "__main__":
    sys.exit(main())
