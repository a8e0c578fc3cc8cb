#!/usr/bin/env bash
# Hold plans, graphs, collectives, margins, ratios and numbers of tests against ci/baseline.json.
#
#   ci/gate.sh [ARGUMENTS OF ddpopt gate …]        for instance --update, or --only gpt
#
# Environment: VENV, PYTHON, TORCH_VERSION as for make. In GitHub Actions it writes annotations and a summary.
# Exit code as ddpopt gate's: 0 nothing moved, 1 something did, 2 usage, 3 no ranks.
set -euo pipefail
# shellcheck source=ci/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test

github=()
[ -z "${GITHUB_STEP_SUMMARY:-}" ] || github=(--github)
exec "$VENV/bin/ddpopt" gate --baseline ci/baseline.json "${github[@]}" "$@"
