"""The process in which backends under test run: its death or silence costs one problem, not the run.

``python -m dsa_topk.conformance.worker JSON`` answers with one JSON object a line on its standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from . import adapters
from .generate import Limits, random_problem
from .minimise import minimise
from .problem import Problem
from .runner import Outcome, run_problem
from .suite import specs

_TICK_S = 0.5


class _Worker:
    def __init__(self, config: dict[str, Any], pipe: TextIO) -> None:
        self.config = config
        self.pipe = pipe
        self.adapter = adapters.get(config["backend"])
        self.device = torch.device(config["device"])
        self.mode = config.get("judge")
        self.saved: set[str] = set()
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self.device.index or 0)
            torch.cuda.set_device(self.device)

    def say(self, **message: Any) -> None:
        self.pipe.write(json.dumps(message) + "\n")
        self.pipe.flush()

    def build_suite(self, index: int) -> Problem:
        return specs(self.config["suite"], self.device)[index].build()

    def build_random(self, index: int) -> Problem:
        return random_problem(self.config["seed"] * 2**32 + index, self.device, Limits(**self.config.get("limits", {})))

    def run_suite(self) -> None:
        """Problems ``skip`` and up."""
        for index, spec in enumerate(specs(self.config["suite"], self.device)):
            if index < self.config.get("skip", 0):
                continue
            self.say(event="begin", index=index, case=spec.case, name=spec.name, length=spec.length)
            problem = spec.build()
            outcome = run_problem(self.adapter, problem, self.mode)
            file = self.keep(problem, outcome, spec.case)
            self.say(event="end", index=index, outcome=outcome.to_dict(), file=file)
            del problem
            self.leave_if_dead(outcome)

    def run_random(self) -> None:
        """Random problems from ``skip`` up until ``until`` (a time of this machine)."""
        counts: dict[str, int] = {}
        rows, index, ticked = 0, self.config.get("skip", 0), time.monotonic()
        while time.time() < self.config["until"] and index < self.config.get("limit", sys.maxsize):
            self.say(event="begin", index=index)
            problem = self.build_random(index)
            outcome = run_problem(self.adapter, problem, self.mode)
            counts[outcome.status] = counts.get(outcome.status, 0) + 1
            rows += outcome.rows
            if not outcome.good:
                file = self.keep(problem, outcome, f"random-{self.config['seed']}-{index}")
                self.say(event="failure", index=index, outcome=outcome.to_dict(), file=file, problem=problem.describe())
            index += 1
            if time.monotonic() - ticked > _TICK_S or not outcome.good:
                self.say(event="tick", counts=counts, rows=rows)
                counts, rows, ticked = {}, 0, time.monotonic()
            self.leave_if_dead(outcome)
        self.say(event="tick", counts=counts, rows=rows)

    def keep(self, problem: Problem, outcome: Outcome, label: str) -> str | None:
        """Minimise and store a failure: the first of each label."""
        folder = self.config.get("save")
        if outcome.good or outcome.status == "crash" or not folder or label in self.saved:
            return None
        self.saved.add(label)

        def fails(candidate: Problem) -> bool:
            return run_problem(self.adapter, candidate, self.mode).status == outcome.status

        smallest = minimise(problem, fails)
        path = Path(folder) / f"{_safe(self.adapter.name)}-{_safe(label)}.replay"
        smallest.save(path)
        return str(path)

    def leave_if_dead(self, outcome: Outcome) -> None:
        """A CUDA context with a sticky error serves no further call."""
        if outcome.status == "crash":
            self.pipe.flush()
            os._exit(70)


def _safe(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in text)


def main() -> None:
    """Run what the JSON argument asks for."""
    config = json.loads(sys.argv[1])
    # A backend that prints must not garble the messages: they get a descriptor of their own.
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = _Worker(config, pipe)
    task = config["task"]
    if task == "suite":
        worker.run_suite()
    elif task == "random":
        worker.run_random()
    elif task == "replay":
        worker.say(event="begin", index=0)
        outcome = run_problem(worker.adapter, Problem.load(Path(config["file"]), worker.device), worker.mode)
        worker.say(event="end", index=0, outcome=outcome.to_dict(), file=None)
    else:  # "store": build a problem that killed its worker, without running it
        build = worker.build_suite if "suite" in config else worker.build_random
        build(config["index"]).save(Path(config["file"]))
    worker.say(event="done")


if __name__ == "__main__":
    main()
