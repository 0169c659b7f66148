# Everything a developer or CI runs. `make help` lists the commands.
SHELL := /bin/bash -o pipefail
LOCK := .ci/requirements.lock
EXTRAS := examples,report,dev
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
NEWER := import sys; sys.exit(not sys.version_info[:2] > (3, 12))
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c '$(SUITABLE)' 2>/dev/null && echo $$p && break; done)
IS_NEWER := $(shell $(PYTHON) -c '$(NEWER)' 2>/dev/null && echo yes)
INFERENCE := $(if $(IS_NEWER),.venv-inference-newer,.venv-inference)
TEAM := -n 2 --dist worksteal
ON_BOTH := $(addprefix tests/,autotune executor graph kernels lowering memory operators partition passes runtime engine/test_training.py)
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Two processes of tests share the cores, so OpenMP's threads sleep rather than spin between loops.
export OMP_WAIT_POLICY := passive

.DEFAULT_GOAL := help
.PHONY: help setup demo test say-inference-only test-training test-inference test-all lint format docs lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: .venv/.ready .venv-inference/.ready ## Both environments, at the locked versions

.venv/.ready .venv-inference/.ready: pyproject.toml $(LOCK)
	@test -n "$(PYTHON)" || { echo "ort_accel needs Python 3.11 or 3.12 here: onnxruntime-training has no build for others. Set PYTHON=/path/to/python3.11; with a newer one, make test PYTHON=python3.13 runs the tests on plain onnxruntime" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint $(LOCK) pip hatchling editables setuptools
	$(@D)/bin/python -m pip install --quiet --constraint $(LOCK) --no-build-isolation --editable '.[$(if $(findstring inference,$@),cpu,training),$(EXTRAS)]'
	touch $@

.venv-inference-newer/.ready: pyproject.toml $(LOCK)
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint $(LOCK) '.[cpu]' expecttest hypothesis psutil pytest pytest-timeout pytest-xdist
	$(@D)/bin/python -m pip uninstall --quiet --yes ort-accel # the tests import it from here
	touch $@

demo: .venv/.ready ## Fine-tune a small BERT on film reviews, eager PyTorch beside ort_accel
	.venv/bin/python examples/hf/run_classification.py --compare_eager

test: $(if $(IS_NEWER),say-inference-only,lint test-training) test-inference ## What CI runs: all checks, and the tests that are not marked as long

say-inference-only:
	@echo "$(PYTHON): onnxruntime-training has no build for a Python newer than 3.12, so only the tests on plain onnxruntime are run; lint and the rest need 3.11 or 3.12"

test-training: .venv/.ready ## Of the whole project, on onnxruntime-training
	.venv/bin/python -m pytest $(TEAM) -m "not long"

test-inference: $(INFERENCE)/.ready ## Those of operators, sessions and training, on plain onnxruntime
	$(INFERENCE)/bin/python -m pytest $(TEAM) -m "not long" $(ON_BOTH)

test-all: lint setup ## All tests, on both runtimes
	.venv/bin/python -m pytest $(TEAM)
	.venv-inference/bin/python -m pytest $(TEAM)

lint: .venv/.ready ## ruff, format check, mypy --strict
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: .venv/.ready ## Put every file into the common format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

docs: .venv/.ready ## Write configs/default.yaml and docs/configuration.md anew from the schema
	.venv/bin/python -m ort_accel.config.reference

lock: setup ## Write the lock file anew from the two environments
	{ echo "# Exact versions for both environments; written by 'make lock'."; \
	  for env in .venv .venv-inference; do $$env/bin/python -m pip list --format=freeze --exclude-editable; done \
	  | sed 's/+cpu$$//' | sort --ignore-case --unique; } > $(LOCK).new && mv $(LOCK).new $(LOCK)

clean: ## Remove the environments and all caches
	rm -rf .venv .venv-inference .venv-inference-newer .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist out
