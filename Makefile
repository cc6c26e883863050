# Every target sets up what it needs: a virtual environment in .venv with the versions pinned in constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.quantkit-installed
# Tests use several processes; one OpenMP thread each, or they slow each other down tenfold.
TEST_ENV := OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types packaging check bench golden docs wheel clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## virtual environment, pinned dependencies, editable install, native kernels

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard kernels/csrc/*)
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## convert the bundled model, verify it, load both views, print perplexity
	$(BIN)/python -m quantkit_evals.demo --out demo-out

test: setup ## run all tests
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile

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

golden: setup ## write the golden files anew, after a deliberate change of the format
	$(BIN)/python tests/golden/regenerate.py

docs: setup ## generate docs/cli.md, docs/recipes.md and the recipe schema
	$(BIN)/python -m quantkit.cli.docs

wheel: setup ## build a wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## remove everything that make created
	rm -rf $(VENV) build dist out demo-out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kernels -name '*.so' -delete
