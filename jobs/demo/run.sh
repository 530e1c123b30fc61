#!/usr/bin/env bash
# The demo: task index, starting policy, then the training run of the given configuration. What exists is
# used again; a run that was interrupted goes on from its last checkpoint.
#
#   jobs/demo/run.sh [CONFIG] [--set KEY=VALUE …]     FRESH=1 starts a new run beside an earlier one
set -euo pipefail
cd "$(dirname "$0")/../.."
config=${1:-configs/demo.env}; [ $# -gt 0 ] && shift
rank=${LEGORL_RANK:-target/release/legorl-rank}
[ -x "$rank" ] || { echo "demo: $rank is missing; run make build" >&2; exit 2; }
work=runs/demo

if [ ! -e "$work/train.parquet" ] || [ ! -e "$work/val.parquet" ]; then
  "$rank" index build jobs/demo/tasks --output "$work/train.parquet" --split-ratio 0.8
fi
if [ ! -e "$work/policy/config.json" ]; then
  echo "demo: making the starting policy (supervised, about three minutes on two cores)"
  "$rank" init-policy --output "$work/policy" --train-files "$work/train.parquet" --val-files "$work/val.parquet"
fi
# A new name is a new run: the earlier one stays where it is.
if [ "${FRESH:-0}" = 1 ]; then set -- "$@" --set "EXP_NAME=$(basename "$config" .env)-$(date +%Y%m%dT%H%M%S)"; fi
case $config in
  *async*)
    as_root=(); [ "$(id -u)" = 0 ] && as_root=(--allow-run-as-root)
    exec mpirun "${as_root[@]}" --oversubscribe --bind-to none -n 2 "$rank" "$config" "$@" ;;
  *) exec "$rank" "$config" "$@" ;;
esac
