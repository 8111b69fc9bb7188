#!/usr/bin/env bash
# Builds the documentation as a site that needs neither a server nor the web: scripts/build_docs.sh [FOLDER]
# A broken link, a page outside the navigation and a public name without a docstring are errors.
set -euo pipefail
out=$(realpath -m "${1:-build/site}")
cd "$(dirname "$0")/.."
export NO_MKDOCS_2_WARNING=true
uv run --quiet --group docs mkdocs build --strict --clean --quiet --site-dir "$out"
echo "$out/index.html"
