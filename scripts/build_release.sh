#!/usr/bin/env bash
# Builds what a release consists of into an empty folder: scripts/build_release.sh dist
# A wheel and a source distribution of every package, the bill of materials (CycloneDX) of what the lock installs with
# every extra, and the SHA-256 of all of them. Built twice from the same commit, packages have the same bytes.
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."
if [ -n "$(ls -A "$out" 2>/dev/null)" ]; then
    echo "$1 is not empty; name another folder" >&2
    exit 2
fi
mkdir -p "$out"

# The bill is written from uv.lock, which is not committed: it must be what requirements.lock says.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ -d .venv ] || uv sync --quiet
uv lock --quiet
uv export --quiet --frozen --no-header --all-packages --all-extras --all-groups --no-emit-workspace >"$work/lock"
uv run --quiet --no-sync python scripts/same_lock.py requirements.lock "$work/lock"

uv build --quiet --all-packages --out-dir "$out"
rm -f "$out/.gitignore"
uv export --quiet --frozen --all-packages --all-extras --no-dev --format cyclonedx1.5 --output-file "$out/sbom.cdx.json"
(cd "$out" && sha256sum -- * >"$work/sums" && cp "$work/sums" SHA256SUMS)
