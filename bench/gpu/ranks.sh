#!/usr/bin/env bash
# A training step over several GPUs of this node, for random weights of Qwen3 shapes: tokens/s, and memory of a rank.
#
#   GPU_BENCH=PROGRAM bench/gpu/ranks.sh "1 2 4" [SHAPE ...]        4B by default
#
# PROGRAM is what `cargo bench --bench gpu --no-run` built. Every GPU has 4 sequences of 4,096 tokens. Needs mpirun, and
# Python with torch and transformers, which makes the weights and whose CUDA libraries are used. Models go to $TMPDIR.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${GPU_BENCH:-}" ] && [ $# -gt 0 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
numbers=$1; shift
[ $# -gt 0 ] || set -- 4B
work=$(mktemp -d "${TMPDIR:-/tmp}/legorl-gpu.XXXXXX"); trap 'rm -rf "$work"' EXIT
site=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
export LD_LIBRARY_PATH=$site/torch/lib:$site/nvidia/cu13/lib:$site/nvidia/cudnn/lib:${LD_LIBRARY_PATH:-}
root=(); [ "$(id -u)" != 0 ] || root=(--allow-run-as-root)

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
for shape in "$@"; do
  python3 bench/gpu/beside.py make "$shape" "$work/$shape"
  for n in $numbers; do
    mpirun "${root[@]}" --bind-to none -n "$n" "$GPU_BENCH" train "$work/$shape"
  done
  rm -rf "${work:?}/$shape"
done
