#!/usr/bin/env bash
# Training and decoding on a GPU beside transformers, for random weights of Qwen3 shapes.
#
#   bench/gpu/run.sh [SHAPE ...]        0.6B and 4B by default
#
# Needs a GPU, and Python with torch and transformers (whose CUDA libraries serve both sides).
# GPU_BENCH names the built program; without it, cargo builds and runs it. Models go to $TMPDIR.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d "${TMPDIR:-/tmp}/legorl-gpu.XXXXXX"); trap 'rm -rf "$work"' EXIT
site=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
export LD_LIBRARY_PATH=$site/torch/lib:$site/nvidia/cu13/lib:$site/nvidia/cudnn/lib:${LD_LIBRARY_PATH:-}
ours() { if [ -n "${GPU_BENCH:-}" ]; then "$GPU_BENCH" "$@"; else cargo bench -q --bench gpu -- "$@"; fi; }

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
[ $# -gt 0 ] || set -- 0.6B 4B
for shape in "$@"; do
  model=$work/$shape
  python3 bench/gpu/beside.py make "$shape" "$model"
  ours train "$model"
  ours train "$model" --budget 16384
  ours train "$model" --graphs
  python3 bench/gpu/beside.py train "$model"
  ours decode "$model"
  python3 bench/gpu/beside.py decode "$model" 1 32
  rm -rf "$model"
done
