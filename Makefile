# `make demo` and `make test` work on a fresh machine with Python 3.11 and a C compiler: each creates .venv first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint bench test-lowest clean

PYTEST := -m pytest --numprocesses 2 --dist worksteal

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,report]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/finetune_then_compress.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m "not slow"

# What `make test` leaves out: more cases of what it tests, and tests that take long.
test-slow: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m slow

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/gptq_vs_llmcompressor.py

# The lowest versions pyproject.toml admits, of everything but torch.
test-lowest: constraints-lowest.txt
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --constraint constraints.txt torch
	.venv-lowest/bin/pip install --quiet --constraint constraints-lowest.txt --editable '.[dev,report]'
	OMP_NUM_THREADS=1 .venv-lowest/bin/python $(PYTEST)

clean:
	rm -rf $(VENV) .venv-lowest outputs multirun
