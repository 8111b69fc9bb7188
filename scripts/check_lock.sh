#!/usr/bin/env bash
# Checks that requirements.lock installs what pyproject.toml resolves to; with --write, brings it up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

uv lock --quiet
export_lock() {
    uv export --quiet --frozen --no-header --all-packages --all-extras --all-groups --no-emit-workspace
}

if [ "${1:-}" = "--write" ]; then
    export_lock >requirements.lock
else
    fresh=$(mktemp)
    trap 'rm -f "$fresh"' EXIT
    export_lock >"$fresh"
    if ! uv run --quiet --no-sync python scripts/same_lock.py requirements.lock "$fresh"; then
        echo "requirements.lock is out of date: run scripts/check_lock.sh --write and commit it" >&2
        exit 1
    fi
fi
