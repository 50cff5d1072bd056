# Every target sets up what it needs by itself. PYTHON=/path/to/python chooses the interpreter.
SHELL := bash
.DEFAULT_GOAL := help
RUN := source .ci/env.sh && .venv/bin/python
WORKDIR ?= runs/demo
SEED ?= 0

.PHONY: help setup demo test lint clean

help:
	@echo "make demo    train a tiny policy with all of SERA on this CPU (SEED=0 WORKDIR=runs/demo)"
	@echo "make test    run the tests"
	@echo "make lint    check style and imports"
	@echo "make clean   remove .venv, caches and build products (runs/ stays)"

setup:
	@PYTHON="$(PYTHON)" .ci/venv.sh

demo: setup
	@$(RUN) -m experiments.demo --workdir=$(WORKDIR) --seed=$(SEED)

test: setup
	@$(RUN) -m pytest

lint: setup
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .

clean:
	rm -rf .venv .jax_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
