#!/usr/bin/env bash
# Checks that requirements.lock is a whole resolution of pyproject.toml. --write brings it up to date and keeps the
# pins it has; --upgrade takes the newest release of every package.
set -euo pipefail
cd "$(dirname "$0")/.."

export_lock() {
    uv export --quiet --frozen --no-header --all-packages --all-extras --all-groups --no-emit-workspace "$@"
}

if [ "${1:-}" = "--upgrade" ]; then
    uv lock --quiet --upgrade
    export_lock >requirements.lock
    exit
fi

# The workspace is resolved again in a copy, held to the committed pins: a newer release of a package is no
# reason to fail, a dependency that the lock leaves out, has too much or contradicts is.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z '*pyproject.toml' | xargs -0 cp --parents -t "$copy"
uv run --quiet --no-sync python scripts/same_lock.py --constrain requirements.lock "$copy/pyproject.toml"
if ! uv lock --quiet --project "$copy" || ! export_lock --project "$copy" >"$copy/fresh"; then
    echo "requirements.lock contradicts a pyproject.toml: run scripts/check_lock.sh --upgrade and commit it" >&2
    exit 1
fi
if [ "${1:-}" = "--write" ]; then
    cp "$copy/fresh" requirements.lock
elif ! uv run --quiet --no-sync python scripts/same_lock.py requirements.lock "$copy/fresh"; then
    echo "requirements.lock is out of date: run scripts/check_lock.sh --write and commit it" >&2
    exit 1
fi
