#!/usr/bin/env bash
# Prepares this clone for building: system packages and libtorch. A second run changes nothing.
#
#   setup/setup.sh build     what `cargo build` and `make demo` need
#   setup/setup.sh test      the same, and what the tests need (Slurm, MUNGE, network tools, a tokenizer, two agents)
#
# As root on Debian or Ubuntu it installs missing packages with apt-get. Otherwise it installs nothing
# outside this folder and names every missing package, and the environment module that usually has it.
# libtorch comes from the PyPI wheel of torch, trimmed to what a CPU build links; the GPU libraries of a
# site's own torch are found at run time. It lies in .deps/libtorch (a link into the user's cache, so
# that a second clone does not download again; LEGORL_CACHE moves the cache).
set -euo pipefail
cd "$(dirname "$0")/.."
want=${1:-build}
case $want in build|test) ;; *) echo "usage: setup/setup.sh build|test" >&2; exit 2 ;; esac

torch_version=2.11.0
cuda_toolkit=13.0.2            # the toolkit that this torch wheel was built with
python_tag=3.11                # any tag works: only the C++ libraries and headers of the wheel are used
cache=${LEGORL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/legorl}

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

command -v cargo >/dev/null || die "cargo is not on PATH; install a Rust toolchain (1.89 or newer) first"
[ "$(uname -m)" = x86_64 ] || die "libtorch's wheel is taken for x86_64 Linux; this machine is $(uname -m)"

# --- system packages -------------------------------------------------------------------------------
# One line each: package, how to see that it is there, the module that clusters usually offer.
clang_found() { ls /usr/lib/llvm-*/lib/libclang*.so* /usr/lib/*/libclang*.so* 2>/dev/null | grep -q . || [ -n "${LIBCLANG_PATH:-}" ]; }
needs() {
  cat <<'LIST'
g++|command -v c++|gcc
libc6-dev|test -e /usr/include/stdlib.h|gcc
make|command -v make|-
pkg-config|command -v pkg-config|pkgconf
libopenmpi-dev|command -v mpicc|openmpi
openmpi-bin|command -v mpirun|openmpi
libclang-dev|clang_found|llvm
bubblewrap|command -v bwrap|-
python3-pip|python3 -m pip --version|python
LIST
  if [ "$want" = test ]; then cat <<'LIST'
slurm-wlm|command -v slurmctld && command -v slurmd && command -v sbatch|-
slurm-wlm-basic-plugins|ls /usr/lib/*/slurm*/auth_munge.so|-
libpmix2|ls /usr/lib/*/libpmix.so*|-
munge|command -v munged|-
iproute2|command -v ip|-
util-linux|command -v nsenter|-
curl|command -v curl|-
busybox-static|test -x /bin/busybox|-
binutils|command -v readelf|-
LIST
  fi
}
missing=() modules=()
while IFS='|' read -r package probe module; do
  if ! eval "$probe" >/dev/null 2>&1; then
    # libtorch's wheel is only needed once; pip is not missing when libtorch is there
    [ "$package" = python3-pip ] && [ -e "$cache/libtorch-$torch_version/COMPLETE" ] && continue
    missing+=("$package"); modules+=("$module")
  fi
done < <(needs)

if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update || die "apt-get update failed; is a Debian or Ubuntu mirror configured?"
    apt-get -qq -y -o DPkg::Lock::Timeout=600 install --no-install-recommends "${missing[@]}" >"${TMPDIR:-/tmp}/legorl-apt.log" 2>&1 \
      || { tail -n 20 "${TMPDIR:-/tmp}/legorl-apt.log" >&2; die "apt-get could not install ${missing[*]}"; }
  else
    say "missing, and this user cannot install packages:"
    for i in "${!missing[@]}"; do
      m=${modules[$i]}
      if [ "$m" = - ]; then say "  ${missing[$i]} (ask the administrator)"; else say "  ${missing[$i]} (or: module load $m)"; fi
    done
    die "install these packages or load the modules, then run this again"
  fi
fi

# --- libtorch --------------------------------------------------------------------------------------
target=$cache/libtorch-$torch_version
if [ ! -e "$target/COMPLETE" ]; then
  mkdir -p "$cache"
  part=$(mktemp -d "$cache/libtorch.XXXXXX"); trap 'rm -rf "$part"' EXIT
  free_mb=$(df -Pm "$cache" | awk 'NR==2{print $4}')
  [ "$free_mb" -ge 2500 ] || die "$cache has $free_mb MB free and libtorch needs 2500 MB while it is unpacked (LEGORL_CACHE moves it)"
  say "downloading libtorch $torch_version (about 545 MB) from the Python package index"
  fetch() {
    python3 -m pip download -q --disable-pip-version-check --no-cache-dir -d "$part/dl" --only-binary=:all: \
      --python-version "$python_tag" --platform manylinux_2_28_x86_64 --platform manylinux_2_25_x86_64 \
      --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "$@" || die "pip could not download $*"
  }
  fetch --no-deps "torch==$torch_version"
  fetch "cuda-toolkit[cudart,cupti]==$cuda_toolkit"
  say "unpacking"
  python3 - "$part" <<'PY'
import pathlib, sys, zipfile
part = pathlib.Path(sys.argv[1])
keep = {"libtorch_cpu.so", "libtorch.so", "libc10.so", "libgomp.so.1", "libshm.so"}
for wheel in (part / "dl").glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            name = item.filename
            torch = name.startswith("torch/include/") or (name.startswith("torch/lib/") and name.split("/")[2] in keep)
            cuda = name.startswith("nvidia/") and "/lib/" in name
            if (torch or cuda) and not name.endswith("/"):
                archive.extract(item, part / "out")
PY
  rm -rf "$part/dl"
  [ -e "$part/out/torch/lib/libtorch_cpu.so" ] || die "the torch wheel holds no libtorch_cpu.so"
  date -u +%FT%TZ >"$part/out/COMPLETE"
  # Another set-up may have finished in the meantime; then its result is used.
  mv -T "$part/out" "$target" 2>/dev/null || [ -e "$target/COMPLETE" ] || die "cannot move libtorch to $target"
fi
mkdir -p .deps
if [ "$(readlink .deps/libtorch || true)" != "$target" ]; then
  [ -d .deps/libtorch ] && [ ! -L .deps/libtorch ] && die ".deps/libtorch is a folder of its own; remove it to use $target"
  ln -sfn "$target" .deps/libtorch
fi
if [ "$want" = test ]; then
  setup/tokenizer.sh >/dev/null && setup/runtimes.sh cc oc \
    || [ -n "${LEGORL_OFFLINE:-}" ] \
    || die "the agents that the tests run could not be had (see above); LEGORL_OFFLINE=1 leaves their tests out"
fi
say "ready: libtorch $torch_version in .deps/libtorch"
