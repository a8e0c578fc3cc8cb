#!/usr/bin/env bash
# Evidence from a machine with one or two GPUs, in at most 40 minutes: one folder of JSON, and one page.
#
#   ci/gpu.sh [--dry-run] [FOLDER]        default: gpu-evidence
#
# Installs, then runs the multi-rank tests, the judge, step times with peak memory, and a traced run. With two GPUs
# each rank has one and NCCL sends. With one GPU, tests and judge run on one rank with NCCL, and the two ranks of
# the step times share the GPU and send with gloo. Each part has a time limit; one that fails does not stop the
# others. FOLDER/page.md is also written to docs/data/gpu.txt, which docs/cuda.md includes.
#
# --dry-run does the same on the CPU with gloo, on less, and leaves the docs alone: only the device is new then.
#
# Environment: VENV, PYTHON, TORCH_VERSION as for make. INSTALLED=1: use VENV as it is.
# Exit code 0: every part passed. 1: a part failed; the last lines name it. 2: usage, or there is no GPU.
set -euo pipefail
dry=
[ "${1:-}" != --dry-run ] || { dry=1; shift; }
if [ "$#" -gt 1 ] || [[ ${1:-} = -* ]]; then
  echo "usage: ci/gpu.sh [--dry-run] [FOLDER], got: $*" >&2
  exit 2
fi
folder=$(realpath -m "${1:-gpu-evidence}")
# shellcheck source=ci/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test
root=$PWD
export PYTHONPATH=$root
python=$(realpath -s "$VENV")/bin/python
rm -rf "$folder"/{parts,tests.xml,judge.json,steps.json,tune.json,trace.json,page.md} && mkdir -p "$folder/parts"

# part NAME SECONDS CODE COMMAND…: a step with a time limit, whose exit code and duration are kept. An exit code up
# to CODE is an answer: 1 of the step times says that a figure is not as asked.
part() {
  local name=$1 limit=$2 answer=$3 start=$SECONDS status=0
  shift 3
  timeout --kill-after 20 "$limit" "$@" || status=$?
  echo "{\"exit_code\": $status, \"seconds\": $((SECONDS - start)), \"command\": \"$*\"}" > "$folder/parts/$name.json"
  [ "$status" -le "$answer" ]
}

"$python" -m ci.gpu machine "$folder" ${dry:+--dry-run}
ranks=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["ranks"])' "$folder/machine.json")
export DDPOPT_NPROC=$ranks
cd "$folder" # not in the checkout: `python -m ddpopt` leaves files where it runs
if [ -n "$dry" ]; then
  step tests part tests 900 0 "$python" -m pytest -q -n 0 --rootdir "$root" \
    --junitxml tests.xml "$root/tests/multigpu/test_equality.py" "$root/tests/multigpu/test_accelerator.py"
  step judge part judge 600 0 "$python" -m ddpopt verify tied --nproc "$ranks" --device cpu --mode ddpopt-inline \
    --no-locate --json judge.json
  step "step times" part steps 600 1 "$python" -m benchmarks.step --models linears --modes eager,inline \
    --backend aot_eager --rounds 1 --rate 1gbit --json steps.json
  step trace part trace 600 0 "$python" -m ddpopt tune tied --nproc "$ranks" --device cpu --backend aot_eager \
    --mode ddpopt-inline --json tune.json --trace trace.json
else
  step tests part tests 840 0 "$python" -m pytest -q -n auto --maxprocesses 8 --rootdir "$root" --junitxml tests.xml \
    "$root/tests/multigpu" --ignore "$root/tests/multigpu/alone"
  step judge part judge 480 0 "$python" -m ddpopt verify gpt --nproc "$ranks" --device cuda --backend inductor \
    --mode ddpopt-inline,ddpopt-split --options default,hook_bf16,autocast --no-locate \
    --json judge.json
  step "step times" part steps 480 1 "$python" -m benchmarks.step --models gpt,linears --device cuda --rounds 6 \
    --json steps.json
  step trace part trace 180 0 "$python" -m ddpopt tune gpt --nproc "$ranks" --device cuda --mode ddpopt-inline \
    --json tune.json --trace trace.json
fi
cd "$root"
step page "$python" -m ci.gpu page "$folder" ${dry:+--dry-run}
finish
