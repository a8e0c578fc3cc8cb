#!/usr/bin/env bash
# Install a wheel with its own dependencies only, and run each command once, on a model outside of the sources.
#
#   ci/wheel_alone.sh dist/ddpopt-0.1.0-py3-none-any.whl
#
# Environment: PYTHON (default python3), TORCH_VERSION (default 2.13.0).
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
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check --quiet)
"${pip[@]}" install "torch==${TORCH_VERSION:-2.13.0}"
"${pip[@]}" install "$wheel"

cd "$work"
export OMP_NUM_THREADS=1
cat >own.py <<'MODEL'
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def model():
    return Net(), torch.randn(4, 64)
MODEL

ran() {
  echo "== ddpopt $*"
  venv/bin/ddpopt "$@" >out.txt 2>err.txt || { code=$?; cat out.txt err.txt; echo "exit code $code"; exit 1; }
}
ran modes
ran cases
ran explain own:model
ran explain own:model --strategy inline
ran doctor own:model --backend eager --steps 2
ran verify own:model --mode inline --report page.html --report junit.xml --json verdict.json
ran matrix --backend eager --mode eager,whole --options default
ran gate own:model --baseline baseline.json --update --backend eager
ran gate --baseline baseline.json --report gate.html
ran link --json link.json
ran tune own:model --mode eager --json tuned.json --html tuned.html --trace trace.json
ran fuzz --examples 2 --backend eager --mode whole

# the marker needs pytest, and nothing else
"${pip[@]}" install pytest
cat >test_own.py <<'TEST'
import pytest
import torch
from ddpopt.testing import assert_ddp_equal
from own import Net


@pytest.mark.world_size(2)
def test_a_compiled_step_computes_what_eager_ddp_computes(ddp_ranks):
    torch.manual_seed(ddp_ranks.rank)
    assert_ddp_equal(Net(), torch.randn(4, 64))
TEST
venv/bin/python -m pytest -q test_own.py
