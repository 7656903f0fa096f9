# `make countdown` and `make test` are all a newcomer needs. The environment is .venv, made with plain python3 and pip;
# it is installed again only when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Options for the recipe: make countdown ARGS="seed=1 optimizer.sigma=0.01"
ARGS ?=

.PHONY: countdown test check lint format bench clean

countdown: $(VENV)/.installed
	$(PY) -m es_cookbook.recipes.countdown.train_cli $(ARGS)

test: $(VENV)/.installed-dev
	$(PY) -m pytest --numprocesses auto --maxprocesses 4 $(ARGS)

check: lint test

lint: $(VENV)/.installed-dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --project pyproject.toml --pythonpath $(PY)
	$(VENV)/bin/lint-imports --no-logo

format: $(VENV)/.installed-dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(VENV)/.installed-dev
	$(PY) -m benchmarks

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# The stamps are written last, so a broken installation is begun again.
$(PY):
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(PY)
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) --editable ".[dev]"
	touch $@
