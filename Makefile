# All commands for people and CI. The first call makes the environment; later calls reuse it.
#
#   make demo     train a small GPT on two ranks and compare it with eager DDP
#   make test     all tests: unit, property, docstring examples, multi-rank
#   make check    format, lint, types, the site
#   make docs     build the site of the documentation
#
# Variables: PYTHON and TORCH_VERSION (docs/support.md), VENV, RANKS, PYTEST_ARGS, DEMO_ARGS, BENCH_ARGS,
# GATE_ARGS.

PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION ?= 2.13.0
RANKS ?= 2

# One thread for each rank and test worker: they already share the cores, and more threads only contend.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

# Tests start hundreds of processes. Where Python may not keep what it compiles, each compiles all of it again.
PYTHONDONTWRITEBYTECODE :=
export PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The torch version is part of the stamp, so a changed version is installed.
TEST_STAMP := $(VENV)/.installed-$(TORCH_VERSION)-test
DEV_STAMP := $(VENV)/.installed-$(TORCH_VERSION)-dev
# One run gives one summary. conftest.py gives all tests that start ranks to one worker; the others run the rest.
# Eight workers are the limit, as each has torch in memory. A crashed worker ends the run: xdist would wait for it.
ALL_CORES := -n auto --maxprocesses 8 --max-worker-restart 0
# Injected faults, tables of damaged engines, backends and steps, programs that hang or differ, and clean runs.
SELF_TEST := tests/multigpu tests/integration/judge/test_simulation.py tests/integration/test_hang.py \
  -k "a_fault or putting_in or each_cell or damaged or the_cause or job_hangs or clean_runs or of_inductor"
# Stacks of a test that takes long are written while it runs, which has ended a process.
LONG := --nightly -o faulthandler_timeout=0
BENCHMARKS := planning compile step alignment simulate
# The benchmarks that read the clock; their timings are also kept for `python -m pyperf compare_to`.
TIMED := planning compile step
kept = --json benchmarks/results/$(1).json $(if $(filter $(1),$(TIMED)),--pyperf benchmarks/results/$(1).pyperf.json)
CODE := ddpopt tests benchmarks examples ci docs/conf.py conftest.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help environment-test environment-dev gate integrations self-test demo test unit integration property doctest multigpu nightly torchrun check fix bench bench-alignment bench-planning bench-compile bench-step docs wheel wheel-test wheel-alone clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---------------------------------------------------------------------------------------- environment

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "ddpopt needs Python 3.11 to 3.13, but $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11 …" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch is installed first: the project's own range would otherwise fetch its newest release.
# Python compiles a module when it is first imported, and most of torch never is: so pip does not compile.
$(TEST_STAMP): pyproject.toml | $(BIN)/python
	@rm -f $(VENV)/.installed-*
	$(PIP) install --no-compile "torch==$(TORCH_VERSION)"
	$(PIP) install --no-compile -e ".[test]"
	@touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	@rm -f $(VENV)/.installed-*
	$(PIP) install --no-compile "torch==$(TORCH_VERSION)"
	$(PIP) install --no-compile -e ".[dev]"
	@touch $(TEST_STAMP) $@

# For the scripts in ci/.
environment-test: $(TEST_STAMP)
environment-dev: $(DEV_STAMP)

# ----------------------------------------------------------------------------------------------- runs

demo: $(TEST_STAMP) ## plan, cut, compile and train a GPT on two ranks, next to eager DDP
	$(BIN)/python -m examples.train_gpt $(DEMO_ARGS)

test: $(TEST_STAMP) ## all tests
	$(BIN)/python -m pytest $(ALL_CORES) tests/unit tests/integration tests/property ddpopt tests/multigpu $(PYTEST_ARGS)

unit: $(TEST_STAMP) ## tests/unit only, on all cores
	$(BIN)/python -m pytest $(ALL_CORES) tests/unit $(PYTEST_ARGS)

integration: $(TEST_STAMP) ## tests/integration only, on all cores
	$(BIN)/python -m pytest $(ALL_CORES) tests/integration $(PYTEST_ARGS)

property: $(TEST_STAMP) ## tests/property only
	$(BIN)/python -m pytest tests/property $(PYTEST_ARGS)

doctest: $(TEST_STAMP) ## the examples in the docstrings only
	$(BIN)/python -m pytest ddpopt $(PYTEST_ARGS)

multigpu: $(TEST_STAMP) ## tests/multigpu only; starts its own ranks
	$(BIN)/python -m pytest $(ALL_CORES) tests/multigpu $(PYTEST_ARGS)

nightly: $(TEST_STAMP) ## all tests, including the long ones
	$(BIN)/python -m pytest $(ALL_CORES) $(LONG) tests/unit tests/integration tests/property ddpopt tests/multigpu $(PYTEST_ARGS)

integrations: $(TEST_STAMP) ## the examples of docs/frameworks.md on two ranks (installs accelerate and lightning)
	$(PIP) install -e ".[test,integrations]"
	$(BIN)/python -m pytest --nightly tests/integration/frameworks $(PYTEST_ARGS)

self-test: $(TEST_STAMP) ## inject faults that the verification has to find, and do clean runs (hours)
	$(BIN)/python -m pytest $(LONG) $(SELF_TEST) $(PYTEST_ARGS)

gate: $(TEST_STAMP) ## compare plans, graphs, collectives, overlap and verdicts with ci/baseline.json
	$(BIN)/ddpopt gate --baseline ci/baseline.json $(GATE_ARGS)

torchrun: $(TEST_STAMP) ## tests/multigpu on the ranks of one torchrun (RANKS=2)
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m pytest tests/multigpu $(PYTEST_ARGS)

check: $(DEV_STAMP) ## format, lint, types, the site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(CODE)
	@$(MAKE) --no-print-directory docs

fix: $(DEV_STAMP) ## apply the formatter and the lint's safe fixes
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# A benchmark that misses a requirement exits with 1, but the others still run: the summary judges.
bench: $(TEST_STAMP) ## all benchmarks in turn into benchmarks/results, and a summary (hours; as root, on an idle machine)
	@mkdir -p benchmarks/results
	@rm -f $(BENCHMARKS:%=benchmarks/results/%.json) $(TIMED:%=benchmarks/results/%.pyperf.json)
	@$(foreach name,$(BENCHMARKS),$(BIN)/python -m benchmarks.$(name) $(call kept,$(name)) || echo "benchmarks.$(name): exit code $$?";)
	$(BIN)/python -m benchmarks.summary

bench-alignment: $(TEST_STAMP) ## overlap potential of each corpus case and cap, as a ratio to eager DDP
	$(BIN)/python -m benchmarks.alignment $(BENCH_ARGS)

bench-planning: $(TEST_STAMP) ## time of plan, partition and certificate, compared with torch's DDPOptimizer
	$(BIN)/python -m benchmarks.planning $(BENCH_ARGS)

bench-compile: $(TEST_STAMP) ## uncached, cold and warm start of a training script, each mode (an hour)
	$(BIN)/python -m benchmarks.compile $(BENCH_ARGS)

bench-step: $(TEST_STAMP) ## step time of each mode over emulated links of 1 and 10 Gbit/s (as root)
	$(BIN)/python -m benchmarks.step $(BENCH_ARGS)

docs: $(DEV_STAMP) ## build the site from docs/ into build/site; a warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site

wheel: $(DEV_STAMP) ## build the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist .

wheel-test: wheel ## run the tests against the installed wheel, in a separate environment
	PYTHON=$(PYTHON) TORCH_VERSION=$(TORCH_VERSION) ci/wheel_test.sh dist/ddpopt-*.whl

wheel-alone: wheel ## install the wheel with nothing else, and run each command once
	PYTHON=$(PYTHON) TORCH_VERSION=$(TORCH_VERSION) ci/wheel_alone.sh dist/ddpopt-*.whl

clean: ## remove builds and caches, not the environment
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
