# Every target sets up what it needs: a virtual environment in .venv with the versions pinned in constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.quantkit-installed
# Tests use several processes; one OpenMP thread each, or they slow each other down tenfold.
TEST_ENV := OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-kernels sanitize lint types packaging check bench bench-kernels bench-serve gpu-check golden docs wheel clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(STAMP) ## virtual environment, pinned dependencies, editable install, native kernels

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard kernels/csrc/*)
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## convert the bundled model, verify it, load both views, print perplexity
	$(BIN)/python -m quantkit_evals.demo --out demo-out

test: setup ## run all tests
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile

KERNEL_TESTS ?= tests/kernels tests/golden tests/oracles
LEVELS = $$($(BIN)/python -c 'from quantkit_kernels.library import Library; print(*Library.load().isa_available)')

test-kernels: setup ## tests of the kernels with the twin and every instruction-set level forced in turn
	@set -e; for level in torch $(LEVELS); do echo "== $$level"; \
	  if [ $$level = torch ]; then force=QUANTKIT_KERNELS=torch; else force=QUANTKIT_CPU_ISA=$$level; fi; \
	  env $$force $(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist loadfile $(KERNEL_TESTS); done

# Leaks are not looked for: Python never frees everything. torch's own code is not instrumented; what it throws
# needs libstdc++ to be there from the start.
SANITIZED := build/sanitize
SANITIZE_TESTS ?= tests/kernels --ignore=tests/kernels/triton --ignore=tests/kernels/test_registry.py -k 'not torch'
sanitize: setup ## tests of the native library built with address and undefined-behaviour sanitizers
	QUANTKIT_SANITIZE=1 $(BIN)/python setup.py -q build --build-lib $(SANITIZED) --build-temp $(SANITIZED)-objects
	PYTHONPATH=$(SANITIZED) LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 $(TEST_ENV) $(BIN)/python -m pytest -q $(SANITIZE_TESTS)

lint: setup ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy, strict
	$(BIN)/mypy

packaging: setup ## build the wheel and look into it
	$(TEST_ENV) $(BIN)/python -m pytest -m packaging tests/test_packaging.py

check: lint types test packaging ## everything that continuous integration runs

bench: setup ## all measurements, written to out/bench as JSON (takes several minutes; nothing else should run)
	$(BIN)/python bench/run_all.py --out out/bench

bench-kernels: setup ## the figures of the kernels: out/bench/kernels.json and .md (nothing else should run)
	$(BIN)/python bench/kernels/run.py --json out/bench/kernels.json

bench-serve: setup ## the figures of the server: out/bench/serve.json and .md (an hour; nothing else should run)
	$(BIN)/python bench/serve/run.py --json out/bench/serve.json

gpu-check: setup ## on a machine with a GPU: Triton kernels, correctness and roofline, to out/gpu-check.json
	$(BIN)/python -m tools.gpu_check

golden: setup ## write the golden files anew, after a deliberate change of the format
	$(BIN)/python tests/golden/regenerate.py

docs: setup ## generate docs/cli.md, docs/recipes.md and the recipe schema
	$(BIN)/python -m quantkit.cli.docs

wheel: setup ## build a wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## remove everything that make created
	rm -rf $(VENV) build dist out demo-out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kernels -name '*.so' -delete
