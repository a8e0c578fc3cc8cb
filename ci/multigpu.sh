#!/usr/bin/env bash
# Run the tests that need ranks, on 2 and on 3 ranks: with gloo, or with NCCL if there are enough GPUs.
#
#   ci/multigpu.sh [RANKS …]        default: 2 3
#
# Environment: VENV, PYTHON, TORCH_VERSION as for make; PYTEST_ARGS, added to pytest's.
# Exit code 0: all passed. 1: something failed; the last lines name it. 2: RANKS is not a number.
set -euo pipefail
for ranks in "$@"; do
  if ! [[ $ranks =~ ^[1-9][0-9]*$ ]]; then
    echo "ci/multigpu.sh: expected numbers of ranks, got '$ranks'" >&2
    exit 2
  fi
done
# shellcheck disable=SC2086  # PYTEST_ARGS is a list of words
# shellcheck source=ci/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test

[ "$#" -gt 0 ] || set -- 2 3
# Starting and ending ranks does not depend on their number, so these tests run once, like the commands that
# start their own ranks.
step "starting and ending ranks, and the commands that do" "$VENV/bin/python" -m pytest -n auto --maxprocesses 8 \
  tests/multigpu/alone tests/integration/judge/test_command.py tests/integration/judge/locating/test_locate.py \
  ${PYTEST_ARGS:-}
for ranks in "$@"; do
  step "$ranks ranks" env DDPOPT_NPROC="$ranks" "$VENV/bin/python" -m pytest -n auto --maxprocesses 8 \
    tests/multigpu --ignore tests/multigpu/alone ${PYTEST_ARGS:-}
done
finish
