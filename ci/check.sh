#!/usr/bin/env bash
# Checks that every commit must pass: format, lint, types, unit, integration and property tests, docstring examples.
#
#   ci/check.sh
#
# Environment: VENV, PYTHON, TORCH_VERSION as for make; PYTEST_ARGS, added to pytest's.
# Exit code 0: all passed. 1: something failed; the last lines name it.
set -euo pipefail
# shellcheck source=ci/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev

# All steps run, so that a lint finding does not hide the results of the tests.
step check make --no-print-directory -k check
# shellcheck disable=SC2086  # PYTEST_ARGS is a list of words
step tests "$VENV/bin/python" -m pytest -n auto --maxprocesses 8 \
  tests/unit tests/integration tests/property ddpopt ${PYTEST_ARGS:-}
finish
