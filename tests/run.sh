#!/usr/bin/env bash
# Runs the tests: `run.sh short` (at most 15 minutes on a built tree), `run.sh long`, `run.sh cluster`.
# LEGORL_TEST_LEVEL tells the tests which list they belong to; a test that the machine cannot run says so
# in a line that starts with SKIP. A long run writes target/test-reports/<date>.md.
set -euo pipefail
cd "$(dirname "$0")/.."
level=${1:-short}
export LEGORL_TEST_LEVEL=$level
setup/agent.sh
export LEGORL_AGENT=$PWD/target/x86_64-unknown-linux-gnu/release/legorl-agent
# The API server that Kubernetes probes are tested with; built once, later from the cache.
if [ "$level" != short ]; then
  tests/cluster/kubernetes.sh build || echo "SKIP kubernetes: the API server could not be built"
fi
cargo build --bins
if command -v cargo-nextest >/dev/null; then
  runner=(cargo nextest run --no-fail-fast)
  case $level in
    short) "${runner[@]}" --workspace ;;
    cluster) "${runner[@]}" -p legorl --test cluster ;;
    long) ;;
  esac
else
  case $level in
    short) cargo test --workspace --no-fail-fast ;;
    cluster) cargo test -p legorl --test cluster ;;
    long) ;;
  esac
fi
[ "$level" = long ] || exit 0
report=target/test-reports/$(date -u +%Y-%m-%dT%H%M).md
mkdir -p "$(dirname "$report")"
# Random inputs of each property of the configuration language.
export LEGORL_FUZZ_CASES=${LEGORL_FUZZ_CASES:-1000000}
{
  echo "# Long test run, $(date -u +%FT%TZ)"
  echo
  echo "Commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(nproc) cores, $(awk '/MemTotal/{printf "%.0f GiB", $2/1048576}' /proc/meminfo), $(. /etc/os-release; echo "$PRETTY_NAME")."
  echo
  echo '```'
} >"$report"
# Agents in Python: their runtimes are half a gigabyte and more, so that only this list needs them.
setup/runtimes.sh ohsdk oh terminus2 || echo "the tests of agents whose runtime is missing will fail; LEGORL_OFFLINE=1 leaves them out"
# References from Python, and inputs by the million for the property tests.
eval "$(setup/references.sh)"
export LEGORL_FUZZ_CASES=${LEGORL_FUZZ_CASES:-1000000}
set +e
if command -v cargo-nextest >/dev/null; then
  # Passing tests print their figures too; nothing is repeated: a test that fails once is in the report.
  cargo nextest run --workspace --no-fail-fast --retries 0 --success-output immediate --failure-output immediate-final 2>&1 | tee -a "$report"
else
  cargo test --workspace --no-fail-fast -- --nocapture 2>&1 | tee -a "$report"
fi
code=${PIPESTATUS[0]}
{ echo '```'; echo; echo "Exit code $code after $SECONDS s."; } >>"$report"
echo "report: $report"
exit "$code"
