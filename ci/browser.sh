#!/usr/bin/env bash
# Have a browser on this machine for the tests that look at the HTML report; does nothing where there is one.
#
#   ci/browser.sh
#
# Environment: BROWSER_PATH, a Chromium or Chrome to use in place of the ones on PATH.
# Exit code 0: its path is printed. 3: there is none, and none could be installed.
set -euo pipefail

find_browser() {
  local name
  for name in "${BROWSER_PATH:-}" chromium chromium-browser google-chrome google-chrome-stable; do
    [ -n "$name" ] && command -v "$name" && return
  done
  return 1
}

install_browser() {
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || { echo "not root, and sudo asks for a password"; return 1; }
    as_root=(sudo)
  fi
  command -v apt-get >/dev/null || { echo "there is no apt-get here"; return 1; }
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq)
  "${apt[@]}" update && "${apt[@]}" install --yes --no-install-recommends chromium fonts-dejavu-core
}

find_browser && exit 0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! install_browser >"$log" 2>&1 || ! find_browser; then
  tail -n 5 "$log" >&2
  echo "ci/browser.sh: expected Chromium or Chrome on PATH, found none and could not install one (see above)." \
    "Install one, or name one in BROWSER_PATH." >&2
  exit 3
fi
