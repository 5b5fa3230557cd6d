# `make demo` and `make test` need python3, pip and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
# What builds the package is pinned too: older pips read the first of these there, newer ones the second.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
INSTALL := $(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check install --quiet

.PHONY: demo test test-slow lint bench clean

demo: .venv/.base
	$(BIN)/perfed run

test: lint
	$(BIN)/python -m pytest --numprocesses 2 -m "not slow"

test-slow: .venv/.test
	$(BIN)/python -m pytest --numprocesses 2 -m slow

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.bench
	$(BIN)/python -m bench

clean:
	rm -rf .venv

# The environment is made without a pip of its own: pip fills it from outside, so that systems whose
# Python comes without ensurepip will do.
.venv/bin/python:
	$(PYTHON) -m venv --without-pip .venv

.venv/.base: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing perfed into .venv (about a minute)"
	$(INSTALL) --editable .
	@touch $@

.venv/.test: .venv/.base
	@echo "installing what the tests need"
	$(INSTALL) --editable ".[test]"
	@touch $@

.venv/.bench: .venv/.base
	@echo "installing what the benchmark compares with"
	$(INSTALL) --editable ".[bench]"
	@touch $@
