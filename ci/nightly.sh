#!/usr/bin/env bash
# What takes too long for every commit: the long tests, with the verification's test of itself; thousands of
# drawn examples, the frameworks that people train with, the gate, torch's own DDP tests, overlap of the whole
# corpus, and models that nobody wrote.
#
#   ci/nightly.sh
#
# Environment: VENV, PYTHON, TORCH_VERSION as for make. FUZZ_MINUTES (default 20). NIGHTLY_REPORTS, a folder for
# reports (default nightly-reports). DDPOPT_EXAMPLE_DATABASE, where Hypothesis keeps what failed.
# PROPERTY_LIMIT (default 4h), after which the drawn examples are ended, and count as failed.
# Exit code 0: all passed. 1: something did not; the last lines name it.
set -euo pipefail
# shellcheck source=ci/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test

reports=${NIGHTLY_REPORTS:-nightly-reports}
mkdir -p "$reports"
pytest=("$VENV/bin/python" -m pytest -n auto --maxprocesses 8)

# stacks of a test that takes long are written while it runs, which has ended a process
step "long tests" "${pytest[@]}" --nightly -o faulthandler_timeout=0 tests/unit tests/integration ddpopt tests/multigpu
step "drawn examples" env HYPOTHESIS_PROFILE=nightly timeout "${PROPERTY_LIMIT:-4h}" \
  "${pytest[@]}" --nightly --timeout 14400 tests/property
step frameworks make --no-print-directory VENV="$VENV-integrations" integrations
step gate ci/gate.sh --json "$reports/gate.json"
step "torch's own DDP tests" "$VENV/bin/python" -m ci.torch_ddp \
  --json "$reports/torch-ddp.json" --markdown "$reports/torch-ddp.md"
step overlap "$VENV/bin/python" -m benchmarks.alignment --modes split,inline --json "$reports/alignment.json"
step fuzz "$VENV/bin/ddpopt" fuzz --nproc 1 \
  --minutes "${FUZZ_MINUTES:-20}" --out "$reports/fuzz"
finish
