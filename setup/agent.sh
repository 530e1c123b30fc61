#!/usr/bin/env bash
# Builds legorl-agent, the helper that runs inside sandboxes, as a static program. It must start in a root
# that holds only a shell, so it links libc statically; with --target, these flags reach it alone and not
# build scripts or the other programs of the workspace. Result: target/x86_64-unknown-linux-gnu/release/.
set -euo pipefail
cd "$(dirname "$0")/.."
target=x86_64-unknown-linux-gnu
RUSTFLAGS="-C target-feature=+crt-static -C relocation-model=static -C strip=symbols" \
  "${CARGO:-cargo}" build -q --release -p legorl-agent --target "$target"
