# Each target makes .venv by itself where it is missing or out of date (scripts/setup.sh).
# PYTHON=python3.12 chooses the Python; ARGS goes to pytest, as in: make test ARGS="-k table"
SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
IN_VENV := PATH="$$PWD/.venv/bin:$$PATH"

export PYTHON

help:
	@echo "make demo    capture, sweep and replay a tiny Llama on 2 FSDP ranks (under 5 minutes)"
	@echo "make test    run the tests, two at a time"
	@echo "make check   lint, types and tests"
	@echo "make interposer  build the library that jobs on a GPU start with"
	@echo "make bench   run the benchmarks, tables into results/"
	@echo "make venv    set up .venv alone"
	@echo "make clean   remove .venv, demo/ and caches"

venv:
	@scripts/setup.sh

demo: venv
	@$(IN_VENV) scripts/demo.sh

test: venv
	@$(IN_VENV) python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: venv
	@$(IN_VENV) ruff check .
	@$(IN_VENV) ruff format --check .
	@$(IN_VENV) mypy

check: lint test

interposer: venv
	@set -o pipefail; $(IN_VENV) python -c "from gemmtune.interposer import build; \
	print(build.library(), 'made by', *build.compiler())" 2>&1 | tail -n 1

bench: venv
	@$(IN_VENV) python bench/run.py

clean:
	rm -rf .venv build demo *.egg-info .*_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help venv demo test lint check interposer bench clean
