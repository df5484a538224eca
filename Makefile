# Batchyard: two commands matter, `make demo` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  \033[1m%-10s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# One stamp per lock file: editing the lock installs again, nothing else does.
$(VENV)/.demo: requirements/demo.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/demo.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.lock
	@touch $@

setup: $(VENV)/.dev ## Install everything that development needs into .venv

demo: $(VENV)/.demo ## Set up, then answer a real file of requests with two embedded models
	$(BIN)/batchyard demo

test: $(VENV)/.dev ## Set up, then run all tests, two at a time
	$(BIN)/python -m pytest -n 2 --dist loadfile

fast: $(VENV)/.dev ## Run the tests that need no model and no minute
	$(BIN)/python -m pytest -m "not model and not slow"

bench: $(VENV)/.dev ## Measure: each figure beside its floor and its peers, in one run
	$(BIN)/python benchmarks/run_all.py

lint: $(VENV)/.dev ## Format check, lint, types, import contracts, module sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/module_sizes.py

format: $(VENV)/.dev ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev ## Write the generated reference pages again; --check is what CI does
	$(BIN)/python tools/generate_docs.py

wheel: $(VENV)/.dev ## Build the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --wheel --outdir dist .

lock: ## Resolve the version locks again (no registry host is written into them)
	$(PYTHON) tools/lock.py

clean: ## Remove everything that these targets made
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache batchyard-demo

.PHONY: help setup demo test fast bench lint format docs wheel lock clean
