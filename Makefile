# Every job of the project. `make demo` and `make test` work right after a clone: they make .venv with the pinned packages
# first. test-gpu and sanitize need a GPU; bench without one times the reference. gates needs nvcc. Nothing else needs either.

# The interpreter for .venv: python3, or the newest one that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PINS := $(wildcard requirements/*.txt)
STAMP := $(VENV)/.installed
# What runs the jobs on a GPU. RUN=python3 takes the machine's own Python, with its CUDA build of torch and without .venv.
RUN ?= $(VENV)/bin/python
READY := $(if $(filter $(VENV)/%,$(RUN)),$(STAMP))
CPP := $(wildcard src/dsa_topk/csrc/*.cu src/dsa_topk/csrc/*.cuh src/dsa_topk/csrc/*.h src/dsa_topk/bench/csrc/*.cu \
	src/dsa_topk/bench/csrc/*.h tests/emulator/*.h tests/emulator/*.cpp)
PIP := $(VENV)/bin/python -m pip install -qq
WHICH := import sys; print("dev" if sys.version_info >= (3, 11) else "dev-py310")
JOBS ?= 2
ARGS ?=

.PHONY: help setup demo test lint format gates test-gpu sanitize bench clean

help:
	@echo "make demo      the main job on real text, results in demo-out/"
	@echo "make test      the tests; those that need a GPU are skipped by name"
	@echo "make lint      ruff, mypy, clang-format; make format puts formats right"
	@echo "make gates     compile for every target: no spills, registers within tools/register_budget.json"
	@echo "make test-gpu  GPU tests and sanitizers, evidence to tests/results/"
	@echo "make sanitize  compute-sanitizer alone"
	@echo "make bench     time the kernels: ARGS='--suite decode --json new.json'"

setup: $(STAMP)

# Torch goes first and alone, so that no other package pulls in another build of it.
$(STAMP): $(PINS) pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: Python 3.10 or later is needed; name one with PYTHON=..." >&2; exit 1; }
	@echo "make: installing the pinned packages into $(VENV) (some minutes)"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/torch.txt
	$(PIP) -c requirements/torch.txt -r requirements/$$($(VENV)/bin/python -c '$(WHICH)').txt
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

demo: $(STAMP)
	$(VENV)/bin/dsa-topk demo $(ARGS)

test: $(STAMP)
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal -q $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP)

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

gates: $(STAMP)
	$(VENV)/bin/python tools/gates.py $(ARGS)

# The machine's own Python has no dsa_topk installed.
test-gpu sanitize bench: export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))

test-gpu: $(READY)
	$(RUN) tools/gpu_evidence.py --sanitize $(ARGS)

sanitize: $(READY)
	$(RUN) tools/sanitize.py $(ARGS)

bench: $(READY)
	$(RUN) -m dsa_topk.cli bench $(ARGS)

clean:
	rm -rf $(VENV) demo-out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .emulator .cache
