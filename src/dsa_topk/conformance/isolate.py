"""Drives workers: reads their messages, notices death and silence, goes on behind the problem that caused it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .minimise import minimise
from .problem import Problem
from .runner import Outcome

_CRASH_TRIALS = 14  # each costs a process start
_START_S = 90  # importing torch and a peer, on a busy machine


class WorkerError(RuntimeError):
    """A worker died before it began a problem: the set-up is broken, not the backend's answer."""


def messages(config: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
    """Messages of one worker. The last one is ``done``, or ``dead`` with a status and a reason."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "dsa_topk.conformance.worker", json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        lines: queue.Queue[str | None] = queue.Queue()

        def pump() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=pump, daemon=True).start()
        patience = timeout + _START_S
        try:
            while True:
                try:
                    line = lines.get(timeout=patience)
                    patience = timeout
                except queue.Empty:
                    yield {"event": "dead", "status": "hang", "reason": f"no answer within {timeout:.0f} s"}
                    return
                if line is None:
                    break
                message = json.loads(line)
                yield message
                if message["event"] == "done":
                    return
            code = process.wait()
            yield {"event": "dead", "status": "crash", "reason": _last_words(code, errors)}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_words(code: int, errors: Any) -> str:
    errors.seek(0)
    text = errors.read().decode(errors="replace").strip().splitlines()
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{how}: {text[-1]}" if text else how


def run_suite(config: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
    """``begin`` and ``end`` messages of all problems of a suite, whatever happens to the workers."""
    skip: int = 0
    current: dict[str, Any] = {}
    stored: set[str] = set()  # the first crash of each case, as for other failures

    def store(begun: dict[str, Any]) -> str | None:
        if begun["case"] in stored:
            return None
        stored.add(begun["case"])
        return _store(config, begun["index"], timeout)

    while True:
        for message in messages({**config, "task": "suite", "skip": skip}, timeout):
            if message["event"] == "begin":
                current = message
                yield message
            elif message["event"] == "end":
                if message["outcome"]["status"] == "crash":
                    message["file"] = store(current)
                skip, current = message["index"] + 1, {}
                yield message
            elif message["event"] == "done":
                return
            elif current:
                outcome = Outcome(message["status"], message["reason"])
                yield {"event": "end", "index": current["index"], "outcome": outcome.to_dict(), "file": store(current)}
                skip, current = current["index"] + 1, {}
            elif skip == 0:
                raise WorkerError(message["reason"])


def run_random(config: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
    """``tick`` and ``failure`` messages of a fuzzing run."""
    skip, current = config.get("skip", 0), None
    while True:
        for message in messages({**config, "task": "random", "skip": skip}, timeout):
            if message["event"] == "begin":
                current, skip = message["index"], message["index"] + 1
            elif message["event"] in ("tick", "failure"):
                if message["event"] == "failure" and message["outcome"]["status"] == "crash":
                    message["file"] = _store(config, message["index"], timeout)
                    current = None
                yield message
            elif message["event"] == "done":
                return
            elif current is not None:
                outcome = Outcome(message["status"], message["reason"])
                yield {
                    "event": "failure",
                    "index": current,
                    "outcome": outcome.to_dict(),
                    "file": _store(config, current, timeout),
                    "problem": {},
                }
                yield {"event": "tick", "counts": {message["status"]: 1}, "rows": 0}
                current = None
            elif skip == config.get("skip", 0):
                raise WorkerError(message["reason"])


def replay(config: dict[str, Any], file: Path, timeout: float) -> Outcome:
    """Run one replay file in a process of its own."""
    for message in messages({**config, "task": "replay", "file": str(file)}, timeout):
        if message["event"] == "end":
            return Outcome(**message["outcome"])
        if message["event"] == "dead":
            return Outcome(message["status"], message["reason"])
    raise WorkerError("the worker ended without an answer")


def _store(config: dict[str, Any], index: int, timeout: float) -> str | None:
    """Write the problem that killed or stopped a worker, and shrink it as far as a few trial processes go."""
    if not config.get("save"):
        return None
    folder = Path(config["save"])
    label = f"random-{config['seed']}-{index}" if "seed" in config else f"problem-{index}"
    path = folder / f"{config['backend'].replace(':', '-')}-{label}.replay"
    answers = [m["event"] for m in messages({**config, "task": "store", "index": index, "file": str(path)}, timeout)]
    if answers[-1:] != ["done"]:
        return None
    trial = path.with_suffix(".trial")

    def fails(candidate: Problem) -> bool:
        candidate.save(trial)
        return replay(config, trial, timeout).status in ("crash", "hang")

    try:
        smallest = minimise(Problem.load(path), fails, config.get("trials", _CRASH_TRIALS))
        smallest.save(path)
    finally:
        trial.unlink(missing_ok=True)
    return str(path)
