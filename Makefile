# Two commands are the whole set-up on a fresh machine: `make nightly` and `make test`.
# Each target creates and reuses .venv and installs only when its inputs changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUN := $(BIN)/megalodon-numerics
INPUTS := pyproject.toml constraints.txt
WORKERS ?= 2

# Compiled functions survive between runs; delete .cache to measure compilation. Small ones too: a
# run of the tests compiles thousands of them.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0

.PHONY: help nightly check test test-day test-all test-long test-ports test-lowest test-newest mutants mutation lint docs reference record checkpoint clean

help:
	@echo "make nightly     compare JAX with megalodon-hf and the oracle, probe bf16, write the page"
	@echo "make check       run the tests that the Python code changed since the last check can affect"
	@echo "make test        lint and run the tests, but for the sweeps"
	@echo "make test-day    the same with a seventh of the sweeps, those of today: what CI runs"
	@echo "make test-all    lint and run every test, with every check on traced values"
	@echo "make test-long   run thousands of random kills, lost replies and edits of stored runs"
	@echo "make test-ports  compare every Flax model of Transformers with its original"
	@echo "make test-lowest the same packages at the lowest versions that pyproject.toml allows"
	@echo "make test-newest the same at the newest versions, such as JAX 0.11: PYTHON=python3.12"
	@echo "make mutants     plant a bug in each module that decides something: do the tests find it?"
	@echo "make mutation    the same with edits drawn at random: PLACE=reports/verdict SEED=1"
	@echo "make lint        ruff, basedpyright, import-linter"
	@echo "make docs        the documents and interfaces as a site, in build/site"
	@echo "make reference   install megalodon-hf, so that comparisons are live"
	@echo "make record      renew noise floors and recordings (needs the reference)"
	@echo "make checkpoint  train the byte-level model again"

nightly: $(VENV)/.base
	@$(RUN) nightly $(ARGS)

PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=15 --durations-min=2
# Compiling is most of the work, and takes two thirds of the time without LLVM's optimisations. They
# make sums somewhat more accurate, which real nights tell, and long runs short: tests of those are
# marked `optimised`.
test: $(VENV)/.dev lint
	@JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST) -m "not sweep" $(ARGS)

# pytest-testmon records which functions each test runs, in .testmondata. It sees Python alone, in the
# test's own process: not templates, stored data, documents, nor what a test starts as a process.
check: $(VENV)/.dev
	@$(PIP) -e '.[check]'
	@JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST) -q --testmon --testmon-forceselect -m "not sweep" $(ARGS); \
	code=$$?; if [ $$code = 5 ] && [ -z '$(ARGS)' ]; then echo "check: no test is affected"; else exit $$code; fi

# A seventh of the sweeps: all of them once in a week, at a seventh of their time.
DAY ?= $(shell LC_ALL=C date -u +%A | tr A-Z a-z)
test-day: $(VENV)/.dev lint
	@JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST) --sweep-day $(DAY) -m "not (flax_models and sweep) and not long" $(ARGS)

test-all: $(VENV)/.dev lint
	@$(PYTEST) --traced-checks always -m "not (flax_models and sweep) and not long" $(ARGS)

# Thousands of random examples: kills, lost replies, an adversary over stored runs.
test-long: $(VENV)/.dev
	@$(PYTEST) -m "long" $(ARGS)

# Every Flax model of Transformers, and every bug planted in them: an hour of two cores.
test-ports: $(VENV)/.dev
	@JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST) -m "flax_models" $(ARGS)

# The lowest versions that pyproject.toml allows, in an environment of their own. Warnings are no
# errors there: old packages warn of one another.
LOWEST := build/lowest
LOWEST_TESTS := tests/megalodon_jax/layers tests/megalodon_jax/test_model_forward.py tests/parity/engine \
  tests/reports/store tests/reports/verdict
test-lowest:
	@rm -rf $(LOWEST) && $(PYTHON) -m venv $(LOWEST)
	@$(PYTHON) -m tools.lowest >$(LOWEST)/lowest.txt
	@$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOWEST)/lowest.txt \
	  -e '.[nightly]' beartype fsspec hypothesis pytest
	@$(LOWEST)/bin/megalodon-numerics nightly --reference recorded --case plain --case stream \
	  --out $(LOWEST)/runs --quiet
	@JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(LOWEST)/bin/python -m pytest -q -W default -m "not sweep" \
	  $(LOWEST_TESTS) $(ARGS)

# The newest versions that it allows, likewise; JAX 0.11 needs Python 3.12.
NEWEST := build/newest
test-newest:
	@rm -rf $(NEWEST) && $(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[nightly]' beartype \
	  flax fsspec hypothesis pytest
	@$(NEWEST)/bin/megalodon-numerics nightly --reference recorded --case plain --case stream \
	  --out $(NEWEST)/runs --quiet
	@JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(NEWEST)/bin/python -m pytest -q -W default -m "not sweep" \
	  $(LOWEST_TESTS) tests/parity/mesh tests/stability/dtype_audit tests/stability/nonfinite $(ARGS)

mutants: $(VENV)/.dev
	@$(BIN)/python -m tools.mutants --executor local:$(WORKERS) $(ARGS)

NUMBER ?= 60
mutation: $(VENV)/.dev
	@$(PIP) -e '.[mutation]'
	@$(BIN)/python -m tools.drawn_mutants $(PLACE) --seed $(SEED) --number $(NUMBER) \
	  $(if $(TESTS),--tests $(TESTS)) $(ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/basedpyright --level error

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

# MEGALODON_HF_SOURCE may name a local checkout. Without either source the recordings stand in.
MEGALODON_HF := $(or $(MEGALODON_HF_SOURCE),megalodon-hf @ git+https://github.com/pszemraj/megalodon-hf@082db4b)
reference: $(VENV)/.base
	@$(PIP) -e '.[reference]'
	@SETUPTOOLS_SCM_PRETEND_VERSION=0.2.0 $(PIP) --no-deps "$(MEGALODON_HF)" 2>$(VENV)/reference.log \
	  && echo "megalodon-hf is installed: comparisons are live from now on" \
	  || echo "megalodon-hf could not be installed (see $(VENV)/reference.log): comparisons use the recordings; set MEGALODON_HF_SOURCE to a local checkout to try again"

record: $(VENV)/.base
	@$(RUN) parity calibrate
	@$(RUN) parity record

checkpoint: $(VENV)/.base
	@$(BIN)/python -m tools.experiments train parity/data/byte_lm

$(VENV)/.base: $(INPUTS)
	@echo "installing megalodon-numerics into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[nightly]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "installing what the tests need"
	@$(PIP) -e '.[dev,torch]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	@echo "installing what the documents need"
	@$(PIP) -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
