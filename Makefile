# Everything runs from .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all anchors test-anchors lint types ui s3 bench gpu-test gpu-bench clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv, install pinned dependencies and build the C kernels

$(STAMP): constraints.txt pyproject.toml setup.py $(wildcard kernels/csrc/*.c kernels/csrc/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c "from numem.kernels import native; print('kernels:', native.isa() if native.available() else 'torch (no C compiler found)')"
	@touch $(STAMP)

demo: setup  ## fetch the real model and run the main job on examples/prompts.jsonl
	$(BIN)/numem demo

test: lint types  ## lint, types and the test suite (under 15 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow"

test-all: lint types  ## the same with the slow tests
	$(BIN)/python -m pytest

anchors: setup  ## fetch the real weights and the text of test-anchors (Gemma: see CONTRIBUTING.md)
	$(BIN)/python -m numem.models.hub.anchors

test-anchors: anchors  ## the tests on real weights, slow ones too
	$(BIN)/python -m pytest -m anchors

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

ui: setup  ## browse runs, lineage and checks at http://127.0.0.1:3000
	$(BIN)/numem ui

s3: setup  ## run a local S3 server in the foreground and print how to reach it
	$(BIN)/python -m numem.bench.s3server

bench: setup  ## run all measurements and write docs/benchmarks.md
	$(BIN)/numem bench all --write docs/benchmarks.md

gpu-test:  ## the tests of GPU kernels, with PYTHON as it is (no environment is made): see benchmarks/README.md
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PYTHON) -m pytest tests/gpu -c benchmarks/pytest.ini --rootdir=$(CURDIR) --confcutdir=tests/gpu -q

gpu-bench:  ## one section of the GPU measurements: make gpu-bench SECTION=decode
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PYTHON) benchmarks/run.py $(SECTION) --commit $$(git rev-parse --short HEAD 2>/dev/null || echo unknown) $(ARGS)

clean:  ## remove the virtual environment and build products
	rm -rf $(VENV) build dist *.egg-info kernels/*.so
