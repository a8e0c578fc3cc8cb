#!/usr/bin/env bash
# Run the tests against an installed wheel, in a folder without the sources.
#
#   ci/wheel_test.sh dist/ddpopt-0.1.0-py3-none-any.whl
#
# Environment: PYTHON (default python3), TORCH_VERSION (default 2.13.0), PYTEST_ARGS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$#" -ne 1 ] || [ ! -f "$1" ]; then
  echo "expected one wheel, got: $*. Build it with: make wheel" >&2
  exit 2
fi
wheel=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install "torch==${TORCH_VERSION:-2.13.0}"
"${pip[@]}" install "$wheel[test]"

# Copy the tests and their settings without the package, so that `import ddpopt` can only find the wheel.
cp -r tests examples benchmarks ci docs .github conftest.py pyproject.toml Makefile LICENSE ./*.md "$work/"
cd "$work"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export OMP_NUM_THREADS
case $(venv/bin/python -c 'import ddpopt; print(ddpopt.__file__)') in
  "$work"/venv/*) ;;
  *) echo "the tests would not run against the wheel: ddpopt comes from elsewhere" >&2; exit 3 ;;
esac
# shellcheck disable=SC2086  # PYTEST_ARGS is a list of words
venv/bin/python -m pytest -n auto --maxprocesses 8 \
  tests/unit tests/integration tests/property --pyargs ddpopt tests/multigpu ${PYTEST_ARGS:-}
