# make demo | test | test-all | lint | bench. Everything runs in .venv, which is made when it is missing.
# PIP_ARGS is passed to pip: on Linux, a CPU-only index for torch saves gigabytes (see README.md).
PYTHON ?= python3
PIP_ARGS ?=
OUT ?= runs/demo
BIN := .venv/bin

.PHONY: demo test test-all lint bench clean

demo: .venv/ready
	$(BIN)/pellucid demo --out $(OUT)

test: .venv/ready
	$(BIN)/python -m pytest

test-all: .venv/ready
	$(BIN)/python -m pytest -m ""

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench: .venv/ready
	for file in perf/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# torch comes first and pinned: an extra must never replace it.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt torch
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
