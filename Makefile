# `make help` lists the targets. PYTHON names the interpreter that makes .venv: make run PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test lint microbench-block-sparse clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.installed  ## complete a Python function with the embedded model; ARGS='--max-new 100' adds flags
	@$(BIN)/clocher-run $(ARGS)

test: lint  ## check style and types, then run the tests
	@$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-test  ## check style and types only
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo 'to reformat: $(BIN)/ruff format .' >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary

microbench-block-sparse: $(VENV)/.installed  ## dense against block-sparse: a table, and a plot in build/
	@mkdir -p build
	@$(BIN)/python -m bench.block_sparse --plot build/block-sparse.png $(ARGS)

clean:  ## remove build products and caches; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# The stamps are older than what they were made from exactly when an installation is due.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'installing into $(VENV) (once)' >&2
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'installing into $(VENV) with what the tests need (once)' >&2
	@$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.installed

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Clocher needs Python 3.11 or newer, \
	$(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -m venv $(VENV)
