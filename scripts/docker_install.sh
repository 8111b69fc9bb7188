#!/usr/bin/env bash
# Builds the workspace's wheels in the working directory and installs them into a fresh environment, as the Dockerfile
# does: scripts/docker_install.sh TARGET. What they need has the versions of requirements.lock, and its hashes.
#   DEVICE      cpu (default): torch for CPUs, TORCH_CPU with its own hash; cuda: the locked torch, which brings CUDA
#   EXTRAS      wheels with extras, such as "rlhf_algos[ray] rlhf_serve[vllm]"
#   UV_FIND_LINKS  a folder with torch for CPUs; without it uv takes it from where PyTorch offers it
set -euo pipefail
target=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cp requirements.lock "$work/constraints"
backend=()
case "${DEVICE:-cpu}" in
cpu)
    # The locked hashes are those of torch with CUDA, which the version alone does not tell from that for CPUs.
    awk '/^torch==/ {skip = 1; next} /^[^ ]/ {skip = 0} !skip' requirements.lock >"$work/constraints"
    echo "$TORCH_CPU" >>"$work/constraints"
    [ -n "${UV_FIND_LINKS:-}" ] || backend=(--torch-backend cpu)
    ;;
cuda) ;;
*)
    echo "DEVICE is ${DEVICE}; expected cpu or cuda" >&2
    exit 2
    ;;
esac

uv build --quiet --all-packages --wheel --out-dir "$work/wheels"
wheels=("$work"/wheels/*.whl)
for extra in ${EXTRAS:-}; do
    files=("$work/wheels/${extra%%\[*}"-*.whl)
    wheels+=("${files[0]}[${extra#*\[}")
done
uv venv --quiet --python "${PYTHON:-python3}" "$target"
uv pip install --quiet --python "$target" --compile-bytecode --constraints "$work/constraints" "${backend[@]}" "${wheels[@]}"
