#!/usr/bin/env bash
# Sourced by the other scripts: change to the repository, use its environment, and define steps: all of them run,
# and the failed ones are named at the end.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" [TEST-OR-DEV]
#
# Environment: VENV (default .venv, made if missing), PYTHON, TORCH_VERSION as for make. INSTALLED=1: use VENV as
# it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One thread for each rank and test worker: they already share the cores, and more threads only contend.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
VENV=${VENV:-.venv}
export VENV
failed=()

# step NAME COMMAND…: run a command, print its duration, and remember whether it failed.
step() {
  local name=$1 status=0 start=$SECONDS
  shift
  echo "::: $name: $*"
  "$@" || status=$?
  echo "::: $name: exit code $status after $((SECONDS - start)) s"
  [ "$status" -eq 0 ] || failed+=("$name (exit code $status)")
}

# finish: fail if any step failed, and name each.
finish() {
  if [ "${#failed[@]}" -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
  fi
  echo "$0: all steps passed"
}

[ -n "${INSTALLED:-}" ] || make --no-print-directory "environment-${1:-test}"
