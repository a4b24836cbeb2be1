# Everything a developer or CI runs; each target sets up what it needs on a fresh Debian 12 or 13.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Tests wait more than they compute, so more run side by side than there are cores; JOBS=0 runs one by one.
JOBS ?= $(shell echo $$((3 * $$(nproc))))
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-vm check bench mutants bpf gen lock clean

help:
	@echo 'make setup    system packages (as root), virtual environment in $(VENV), $(BIN)/gpu-agent'
	@echo 'make demo     a live table of a simulated 8-GPU node (ARGS="--scenario xid-79 --json")'
	@echo 'make test     all tests (ARGS="tests/core -k xid")'
	@echo 'make test-vm  the probe in a virtual machine with Debian'\''s kernel, minutes (ARGS="--loader core")'
	@echo 'make check    linters, types, architecture, generated code'
	@echo 'make bench    the figures we promise, beside their targets (ARGS=--json)'
	@echo 'make mutants  mutation score of agent/core (minutes)'
	@echo 'make bpf      the precompiled eBPF probe (needs clang and libbpf-dev)'
	@echo 'make gen      generate code from proto/'
	@echo 'make lock     resolve the locked dependencies anew'

setup: $(STAMP)

$(STAMP): pyproject.toml requirements-dev.txt .ci/setup $(wildcard agent/simulation/nvml/*.[ch] bpf/*.[ch])
	@PYTHON='$(PYTHON)' VENV='$(VENV)' .ci/setup
	@touch $@

demo: $(STAMP)
	@$(BIN)/gpu-agent demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --durations=10 $(ARGS)

test-vm: $(STAMP)
	@$(BIN)/python -m tests.vm $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	.ci/gen --check

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

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache mutants
