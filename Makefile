# `make help` lists the targets. PYTHON names the interpreter that makes .venv: make run PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
ARGS ?=
EMBEDDED := clocher_runtime/assets/clocher-tiny-gptoss

.DEFAULT_GOAL := help
.PHONY: help run chat test lint build build-cuda verify bench bench-cuda bench-report bench-verify \
  microbench microbench-block-sparse profile clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-23s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.installed  ## tell a story with SmolLM2-135M-Instruct, fetched once; ARGS='--max-new 100' adds flags
	@$(BIN)/clocher run $(ARGS) </dev/null

chat: $(VENV)/.installed  ## talk with a model in the terminal; ARGS=DIR names it
	@$(BIN)/clocher chat $(ARGS)

test: lint  ## check style and types, then run the tests, two files at a time
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.installed-test  ## check style and types only
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo 'to reformat: $(BIN)/ruff format .' >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary

build: $(VENV)/.installed  ## nothing to compile: build/inference-engine is clocher-run
	@mkdir -p build
	@printf '#!/bin/sh\nexec "%s/clocher-run" "$$@"\n' '$(abspath $(BIN))' >build/inference-engine
	@chmod +x build/inference-engine

build-cuda: $(VENV)/.installed-cuda  ## install what a GPU needs: build/inference-engine.cuda
	@mkdir -p build
	@printf '#!/bin/sh\nexec "%s/clocher-run" --device cuda "$$@"\n' '$(abspath $(BIN))' \
	  >build/inference-engine.cuda
	@chmod +x build/inference-engine.cuda

verify: $(VENV)/.installed-test  ## compare every token of the embedded model with Hugging Face transformers
	@mkdir -p build
	@IE_ACT_PREC=fp32 $(BIN)/clocher-run --model-dir $(EMBEDDED) --kv-dtype f32 \
	  --trace-ids build/trace.jsonl --trace-topk 5 $(ARGS) >build/verify-run.json
	@$(BIN)/python scripts/verify_hf_generation_ids.py --trace-jsonl build/trace.jsonl \
	  --hf-dir $(EMBEDDED) --dtype fp32 --check-prompt --out build/verify.json

# A path that a variable names counts from where make was called, also with make -C.
bench bench-cuda bench-report bench-verify: export MAKE_CALLED_FROM := $(PWD)

bench:  ## time MODEL_DIR over PROMPTS in fresh processes, check, report
bench-cuda:  ## the same on the GPU; make build-cuda installs what it needs
bench-report:  ## the report; what the last bench measured already is not run again
bench-verify:  ## check the results of the last bench, or REPORT_PATH
bench bench-cuda bench-report bench-verify: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.targets $@ $(ARGS)

microbench: $(VENV)/.installed-bench $(VENV)/.installed-test  ## every op of the op table, with pytest-benchmark
	@$(BIN)/python -m pytest bench/microbench.py --benchmark-quiet $(ARGS)

microbench-block-sparse: $(VENV)/.installed-bench  ## dense against block-sparse weights: a table
	@$(BIN)/python -m bench block_sparse $(ARGS)

profile: $(VENV)/.installed  ## where the time of a step goes: a table, and a flame graph in build/
	@mkdir -p build
	@$(BIN)/python -m bench profile --svg build/profile.svg $(ARGS)

clean:  ## remove build outputs, reports and caches; .venv stays
	rm -rf build dist bench/reports *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# The stamps are older than what they were made from exactly when an installation is due.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'installing into $(VENV) (once)' >&2
	@$(PIP) -e '.[serve]'
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/pip
	@echo 'installing into $(VENV) what "$*" needs (once)' >&2
	@$(PIP) -e '.[$*]'
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Clocher needs Python 3.11 or newer, \
	$(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -m venv $(VENV)
