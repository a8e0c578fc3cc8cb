#!/usr/bin/env bash
# Test the checkout with several releases of torch, each in its own environment outside the checkout, and write a
# row for each into docs/support.md. Other rows stay.
#
#   ci/releases.sh [VERSION …]        default: 2.15.0 2.13.0 2.11.0; "nightly" is torch's nightly build
#
# Environment: PARTS, of "tests self-test matrix" (default all; the self-test takes some hours, the matrix half of
# one). What an earlier call ran is kept, and the row has the commit of each part; what none ran is "not run".
# RELEASES_HOME, the folder of environments and results (default ~/.cache/ddpopt-releases). PYTHON as for make;
# PYTEST_ARGS, added to pytest's; MATRIX_ARGS, added to those of ddpopt matrix.
# Exit code 0: no test failed, and the matrix ran. 1: one did, or a release cannot be installed. 2: no such part.
set -euo pipefail
[ "$#" -gt 0 ] || set -- 2.15.0 2.13.0 2.11.0
if [ "$#" -gt 1 ]; then
  failed=()
  for version in "$@"; do "$0" "$version" || failed+=("$version (exit code $?)"); done
  [ "${#failed[@]}" -eq 0 ] || { printf 'torch %s\n' "${failed[@]}" >&2; exit 1; }
  exit
fi
parts=${PARTS:-tests self-test matrix}
for part in $parts; do
  case $part in
    tests | self-test | matrix) ;;
    *) echo "ci/releases.sh: expected PARTS of tests, self-test, matrix, got '$part'" >&2; exit 2 ;;
  esac
done
home=${RELEASES_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/ddpopt-releases}
export VENV=$home/$1
[ "$1" = nightly ] || export TORCH_VERSION=$1
# shellcheck source=ci/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test
if [ "$1" = nightly ]; then
  "$VENV/bin/python" -m pip install --pre --upgrade --index-url https://download.pytorch.org/whl/nightly/cpu torch
fi
export PYTHONPATH=$PWD # another checkout may have made the environment

results=$VENV/results
mkdir -p "$results"
run() { make --no-print-directory "$1" PYTEST_ARGS="--junitxml $results/$1.xml ${PYTEST_ARGS:-}"; }
matrix() { # exit code 1 is an answer: torch's own modes are wrong under some options
  # shellcheck disable=SC2086  # MATRIX_ARGS is a list of words
  "$VENV/bin/ddpopt" matrix --backend eager --json "$results/matrix.json" ${MATRIX_ARGS:-} || [ $? -eq 1 ]
}
for part in $parts; do
  git rev-parse --short HEAD > "$results/$part.commit"
  case $part in
    tests) : > "$results/test.xml"; step tests run test ;; # an empty file: the part ended without a result
    self-test) : > "$results/self-test.xml"; step self-test run self-test ;;
    matrix) : > "$results/matrix.json"; step matrix matrix ;;
  esac
done
step "row in docs/support.md" "$VENV/bin/python" -m ci.releases "$results"
finish
