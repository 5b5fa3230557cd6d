# `make demo` and `make test` need python3, pip and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
# What builds the package is pinned too: older pips read the first of these there, newer ones the second.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
INSTALL := $(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check install --quiet

.PHONY: demo test test-slow test-federation lint mutants bench bench-peers clean

demo: .venv/.base
	$(BIN)/perfed run

# Most of the time is compilation, so programs are compiled with less effort here than users have them; the
# slow tests compile as usual.
test: export XLA_FLAGS := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true \
	--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1
test: lint
	$(BIN)/python -m pytest --numprocesses 2 -m "not slow and not federation"

test-slow: .venv/.test
	$(BIN)/python -m pytest --numprocesses 2 -m slow

# Federations whose processes fail or attack: a quarter of an hour, most of it waiting.
test-federation: .venv/.test
	$(BIN)/python -m pytest --numprocesses 2 -m federation

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Which small breaks no test notices: an hour.
mutants: .venv/.test
	$(BIN)/python tests/mutants.py

bench: .venv/.bench
	$(BIN)/python -m bench

# Each contestant gets an environment of its own in bench/.venvs, 5.7 GB in all.
bench-peers: .venv/.bench
	$(BIN)/python -m bench.floor
	$(BIN)/python -m bench.peers

clean:
	rm -rf .venv bench/.venvs

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
