# Everything a developer or CI runs; each target sets up what it needs on a fresh Debian 12 or 13.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Tests wait more than they compute, so more workers run than there are cores; JOBS=0 runs one by one.
JOBS ?= $(shell echo $$((3 * $$(nproc))))
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
DEMO_STAMP := $(VENV)/.demo-done
SOURCES := pyproject.toml requirements.txt .ci/setup $(wildcard agent/simulation/*.t* agent/simulation/nvml/*.[ch] bpf/*.[ch])

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-vm test-system check bench mutants bpf wheel gen lock clean

help:
	@echo 'make setup    system packages (as root), virtual environment in $(VENV), $(BIN)/gpu-agent'
	@echo 'make demo     a live table of a simulated 8-GPU node (ARGS="--scenario xid-79 --json"); needs less than setup'
	@echo 'make test     all tests (ARGS="tests/core -k xid")'
	@echo 'make test-vm  the probe in a virtual machine with Debian'\''s kernel, minutes (ARGS="--loader core")'
	@echo 'make test-system  a booted Debian 12 and 13, as root, minutes: unit, install, demo, container runtimes'
	@echo 'make check    linters, types, architecture, generated code'
	@echo 'make bench    the promised figures, beside their targets (ARGS=--json)'
	@echo 'make mutants  mutation score of agent/core (hours; ARGS=PATTERN of mutants)'
	@echo 'make bpf      the precompiled eBPF probe (needs clang and libbpf-dev)'
	@echo 'make wheel    dist/*.whl: for nodes, with the precompiled probe in it, and the simulated node'
	@echo 'make gen      generate code from proto/'
	@echo 'make lock     resolve the locked dependencies again'

setup: $(STAMP)

$(STAMP): $(SOURCES) requirements-dev.txt
	@PYTHON='$(PYTHON)' VENV='$(VENV)' .ci/setup
	@touch $@ $(DEMO_STAMP)

$(DEMO_STAMP): $(SOURCES)
	@PYTHON='$(PYTHON)' VENV='$(VENV)' .ci/setup demo
	@touch $@

demo: $(DEMO_STAMP)
	@$(BIN)/gpu-agent demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --durations=10 $(ARGS)

test-vm: $(STAMP)
	@$(BIN)/python -m tests.vm $(ARGS)

test-system: wheel
	@.ci/system
	$(BIN)/python -m pytest -n 2 --dist loadgroup -rs --capture=no -o faulthandler_timeout=1200 --durations=10 tests/system $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	.ci/gen --check
	.ci/words

bench: $(STAMP)
	@$(BIN)/python -m tests.bench $(ARGS)

mutants: $(STAMP)
	cd $(CURDIR) && PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/core/mutation_score.py $(ARGS)

gen: $(STAMP)
	.ci/gen

lock: $(STAMP)
	.ci/lock

bpf:
	.ci/bpf

# Remove the files of earlier builds first.
wheel: $(STAMP)
	@rm -rf build/lib* build/bdist* build/temp* build/simulation dist
	@$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist . ./agent/simulation
	@ls dist/*.whl

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache mutants
