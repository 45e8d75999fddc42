#!/usr/bin/env bash
# Installs the programs that some tests drive: a browser for the server's page, nginx for restarts behind a proxy.
# Does what it can: without root or apt nothing is installed, and those tests are skipped with a reason.
set -uo pipefail

missing=()
command -v chromium >/dev/null || missing+=(chromium)
command -v nginx >/dev/null || missing+=(nginx-light)
if [ "${#missing[@]}" -eq 0 ]; then
  exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "note: tests that need ${missing[*]} will be skipped; on Debian: apt install ${missing[*]}"
  exit 0
fi
echo "Installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# The packages start services of their own; no service is wanted, tests start what they need on free ports.
policy=/usr/sbin/policy-rc.d
[ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && trap 'rm -f "$policy"' EXIT; }
if ! { apt-get -qq update && apt-get -qq install --yes --no-install-recommends "${missing[@]}"; } >/dev/null; then
  echo "note: ${missing[*]} could not be installed; the tests that need them will be skipped"
fi
