# Two commands for a newcomer: `make demo` and `make test`. Each sets up everything it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint types contracts unit docs test-gpu bench-cpu format clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The exact torch keeps the download small and the tests the same for everybody; the package itself
# takes any torch from 2.11 on.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,docs]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'torchvision>=0.26,<0.29'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'transformers>=5.17,<6' pillow
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'timm>=1.0.29'
	touch $@

demo: $(VENV)/.demo  ## Plan, run and check NASNet-A mobile against eager PyTorch
	$(BIN)/torch-nimble demo

test: lint types contracts unit  ## Everything CI runs

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

contracts: $(VENV)/.test
	$(BIN)/lint-imports

# Two processes share the cores: waiting threads must sleep instead of spinning.
unit: $(VENV)/.test
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# The variable keeps mkdocs-material from advertising its successor.
docs: $(VENV)/.test  ## Build the documentation as a site, into build/docs
	$(BIN)/python docs/make_figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# With a Python whose torch sees a GPU, not with the venv's: PYTHON=… make test-gpu. Pytest plugins that
# happen to be there do not matter.
test-gpu:  ## The tests that need a GPU
	PYTHONPATH=src:tests $(PYTHON) -m pytest -o addopts=-ra -W ignore::pytest.PytestConfigWarning \
		-p no:benchmark tests/gpu

format: $(VENV)/.test  ## Put the code into its standard form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-cpu: $(VENV)/.test  ## Measure against eager on this machine's CPU
	$(BIN)/torch-nimble bench --suite cpu --device cpu

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
