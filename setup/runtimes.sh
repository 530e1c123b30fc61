#!/usr/bin/env bash
# Installs runtimes of foreign agents: folders that sandboxes carry read-only. A second run changes nothing.
#
#   setup/runtimes.sh NAME…            the versions that this program was tested with
#   setup/runtimes.sh NAME@VERSION…    others (SCAFFOLD_VERSION selects them in a run config)
#
#   cc          Claude Code      npm, about 190 MB to download, 400 MB on disk
#   oc          OpenCode         npm, about 60 MB to download, 190 MB on disk
#   ohsdk       OpenHands SDK    Python, 760 MB on disk
#   oh          OpenHands        Python, 1400 MB on disk
#   terminus2   Terminus 2       Python, 520 MB on disk
#
# Those in Python bring their own interpreter: setup/runtimes/python.sh.
#
# Runtimes lie in LEGORL_RUNTIMES, or in `runtimes` of the user's cache (LEGORL_CACHE moves the cache).
# Downloads are compared with pinned checksums, other versions with the registry's own. A folder appears under
# its name when it is complete; `src/rollout/scaffold/runtime.rs` describes it. With LEGORL_OFFLINE set
# nothing is downloaded, and a runtime that is missing is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${LEGORL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/legorl}
root=${LEGORL_RUNTIMES:-$cache/runtimes}

say() { printf 'runtimes: %s\n' "$*"; }
die() { printf 'runtimes: error: %s\n' "$*" >&2; exit 1; }
. setup/npm.sh

# One function a runtime, `make_NAME VERSION FOLDER`: fills FOLDER and prints the entry, the agent's program
# relative to it, as its last line. `pinned NAME` is the tested version, `size_mb NAME` the room it needs.
pinned() {
  case $1 in
    cc) echo 2.1.332 ;;
    oc) echo 1.18.33 ;;
    ohsdk) echo 1.58.2 ;;
    oh) echo 1.11.0 ;;
    terminus2) echo 0.26.0 ;;
    *) return 1 ;;
  esac
}
size_mb() {
  case $1 in
    cc) echo 800 ;;
    oc) echo 400 ;;
    terminus2) echo 1200 ;;
    *) echo 2000 ;;
  esac
}

make_cc() {
  local integrity=
  [ "$1" = 2.1.332 ] && integrity=sha512-f4JWhzwYutJIHScC7/dYOPX6s28tt7ZADhsOi8zwOHq5fFPEuUeChh2NMfinSg0GrUckYxaeebC4h0DqiKzLcw==
  npm_fetch @anthropic-ai/claude-code-linux-x64 "$1" "$integrity" "$2"
  starts "$2/claude"
  echo claude
}

make_oc() {
  local package=opencode-linux-x64 integrity=
  # Its ordinary build needs AVX2.
  grep -qw avx2 /proc/cpuinfo || package=opencode-linux-x64-baseline
  case $package@$1 in
    opencode-linux-x64@1.18.33) integrity=sha512-q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw== ;;
    opencode-linux-x64-baseline@1.18.33) integrity=sha512-1KQGBiiDDeL/VHHbHkOvvFo8Jr97WT5+C1tear+p7IcDTnXgVHXqIjU4O4jM4mHQzykTP2i884FCnW5LDa+zCA== ;;
  esac
  npm_fetch "$package" "$1" "$integrity" "$2"
  starts "$2/bin/opencode"
  echo bin/opencode
}

make_python() {
  # The place inside sandboxes is in the tree's programs.
  setup/runtimes/python.sh "$1" "$2" "$3" "/opt/legorl/runtimes/$1-$2" || exit 1
  echo bin/python3
}
make_ohsdk() { make_python ohsdk "$@"; }
make_oh() { make_python oh "$@"; }
make_terminus2() { make_python terminus2 "$@"; }

# starts PROGRAM: it runs on this machine and says its version.
starts() {
  local home; home=$(mktemp -d)
  if ! env -i PATH="$PATH" HOME="$home" timeout 60 "$1" --version >"$home/said" 2>&1; then
    cat "$home/said" >&2; rm -rf "$home"
    die "${1##*/} was downloaded and does not run on this machine"
  fi
  rm -rf "$home"
}

# finish NAME VERSION FOLDER ENTRY: makes files readable for every user of sandboxes, lists them, and writes
# the manifest.
finish() {
  chmod -R a+rX,go-w "$3"
  (cd "$3" && find . -type f ! -name 'runtime.manifest' ! -name 'runtime.files' -printf '%s %P\n' | LC_ALL=C sort -k2 >runtime.files)
  local crc; crc=$(gzip -1 -c "$3/runtime.files" | tail -c 8 | od -An -N4 -tu4 | tr -d ' ')
  printf '%s\n' "legorl-runtime 1" "name $1" "version $2" "entry $4" \
    "files $(wc -l <"$3/runtime.files")" "crc32 $crc" >"$3/runtime.manifest"
}

install() {
  local name=${1%%@*} version=${1#*@} target part entry free
  [ "$version" != "$1" ] || version=$(pinned "$name") || die "there is no runtime \`$name\`; there are: cc oc ohsdk oh terminus2"
  case $version in ''|*[!A-Za-z0-9._+-]*) die "\`$version\` is not a version" ;; esac
  target=$root/$name-$version
  if [ -e "$target/runtime.manifest" ]; then say "$name $version is in $target"; return; fi
  declare -F "make_$name" >/dev/null || die "there is no runtime \`$name\`; there are: cc oc ohsdk oh terminus2"
  [ -z "${LEGORL_OFFLINE:-}" ] || die "$name $version is not in $root, and LEGORL_OFFLINE forbids downloads"
  mkdir -p "$root"
  # Two at once: the second waits and finds the work done.
  exec 9>"$root/.lock"
  flock -w 3600 9 || die "waited an hour for another setup/runtimes.sh"
  if [ -e "$target/runtime.manifest" ]; then say "$name $version is in $target"; return; fi
  # What an earlier, killed set-up left: nobody else works here while the lock is held.
  rm -rf "$root"/.part.*
  free=$(df -Pm "$root" | awk 'NR==2{print $4}')
  [ "$free" -ge "$(size_mb "$name")" ] || die "$root has $free MB free and $name needs $(size_mb "$name") MB while it is unpacked (LEGORL_RUNTIMES moves it)"
  say "installing $name $version"
  part=$(mktemp -d "$root/.part.XXXXXX")
  entry=$(set -e; "make_$name" "$version" "$part") || { rm -rf "$part"; exit 1; }
  finish "$name" "$version" "$part" "${entry##*$'\n'}"
  rm -rf "$target"
  mv -T "$part" "$target"
  exec 9>&-
  say "$name $version is in $target ($(du -sm "$target" | cut -f1) MB)"
}

usage() { sed -n '2,13p' setup/runtimes.sh | sed 's/^# \{0,1\}//'; }
case ${1:-} in
  '') usage >&2; exit 2 ;;
  -h|--help) usage; exit 0 ;;
  -*) usage >&2; die "\`$1\` is no option" ;;
esac
for one in "$@"; do install "$one"; done
