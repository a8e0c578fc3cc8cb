#!/usr/bin/env bash
# Compare plans, graphs, collectives, overlap and verdicts with ci/baseline.json.
#
#   ci/gate.sh [ARGUMENTS OF ddpopt gate …]        for instance --update, or gpt
#
# Environment: VENV, PYTHON, TORCH_VERSION as for make. In GitHub Actions it writes the step's summary.
# Exit code as ddpopt gate's: 0 nothing changed, 1 something did, 2 usage, 3 not judged.
set -euo pipefail
# shellcheck source=ci/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test

summary=()
[ -z "${GITHUB_STEP_SUMMARY:-}" ] || summary=(--report "$GITHUB_STEP_SUMMARY")
exec "$VENV/bin/ddpopt" gate --baseline ci/baseline.json "${summary[@]}" "$@"
