#!/usr/bin/env bash
# A private Kubernetes API server on this machine, for tests of the probes: kube-apiserver and etcd, no
# nodes. Needs Debian 12's source package `kubernetes`, Go, and about 2 GB of disk while it is built.
#
#   kubernetes.sh build      build kube-apiserver into the cache once (5 to 10 minutes on two cores)
#   kubernetes.sh built      exit 0 when it lies there
#   kubernetes.sh up DIR     start both; prints the port. DIR gets one kubeconfig a case:
#                            admin.kubeconfig      may do everything
#                            forbidden.kubeconfig  a known user without any right
#                            stranger.kubeconfig   a token that the server does not know
#                            dead.kubeconfig       an address that nothing listens on
#                            nocontext.kubeconfig  no current context
#                            broken.kubeconfig     not YAML
#   kubernetes.sh down DIR   end both
#
# The cache is ~/.cache/legorl (LEGORL_CACHE moves it). Certificates, keys and tokens are made anew at
# every start and live in DIR alone. Every wait has a limit; what fails prints the end of its log.
set -euo pipefail
usage() { sed -n '2,16p' "$0"; exit 2; }
cache=${LEGORL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/legorl}
target=$cache/kube-apiserver-1
say() { printf 'kubernetes.sh: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

packages() {  # what is missing, one a line
  while read -r package probe; do eval "$probe" >/dev/null 2>&1 || echo "$package"; done <<'LIST'
golang-go command -v go || test -x /usr/lib/go/bin/go
etcd-server command -v etcd
dpkg-dev command -v dpkg-source
rsync command -v rsync
jq command -v jq
openssl command -v openssl
make command -v make
LIST
}

build() {
  [ -x "$target/kube-apiserver" ] && command -v etcd >/dev/null && return
  mkdir -p "$cache"
  exec 9>"$cache/kube-apiserver.lock"
  flock -w 1800 9 || die "another build holds $cache/kube-apiserver.lock for 30 minutes"
  mapfile -t missing < <(packages)
  if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" = 0 ] || die "not installed: ${missing[*]}"
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update || die "apt-get update failed"
    apt-get -qq -y -o DPkg::Lock::Timeout=600 install --no-install-recommends "${missing[@]}" >/dev/null \
      || die "apt-get could not install ${missing[*]}"
    # Packages start their daemons on some machines; the tests run their own.
  fi
  [ -x "$target/kube-apiserver" ] && return
  free_mb=$(df -Pm "$cache" | awk 'NR==2{print $4}')
  [ "$free_mb" -ge 2500 ] || die "$cache has $free_mb MB free and the build needs 2500 MB"
  work=$(mktemp -d "$cache/kubernetes.XXXXXX")
  trap 'chmod -R u+w "$work" 2>/dev/null; rm -rf "$work"' EXIT
  # The machine's own package source, asked for sources; the machine's lists are not changed.
  mkdir -p "$work/apt/lists/partial" "$work/apt/parts"
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [ -f "$file" ] && sed -n 's/^deb /deb-src /p' "$file" >>"$work/apt/parts/sources.list" || true
  done
  for file in /etc/apt/sources.list.d/*.sources; do
    [ -f "$file" ] && sed 's/^Types:.*/Types: deb-src/' "$file" >"$work/apt/parts/$(basename "$file")" || true
  done
  apt=(apt-get -qq -o "Dir::Etc::SourceList=/dev/null" -o "Dir::Etc::SourceParts=$work/apt/parts"
       -o "Dir::State::Lists=$work/apt/lists" -o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache=" -o "APT::Sandbox::User=root")
  "${apt[@]}" update || die "the package source offers no source packages"
  say "downloading the source package"
  (cd "$work" && "${apt[@]}" source --download-only kubernetes) || die "no source package kubernetes (Debian 12 has it)"
  (cd "$work" && dpkg-source --no-check -x kubernetes_*.dsc tree >/dev/null)
  say "building kube-apiserver in $work (5 to 10 minutes; the log is build.log there)"
  go=$(command -v go || echo /usr/lib/go/bin/go)
  (
    cd "$work/tree"
    # Versions that the tree would otherwise take from git.
    export KUBE_GIT_VERSION=v1.20.2 KUBE_GIT_COMMIT=debian KUBE_GIT_TREE_STATE=clean KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20
    export HOME=$work/home GOPATH=$work/tree/.go CGO_ENABLED=0 PATH=$(dirname "$(readlink -f "$go")"):$PATH
    export GOCACHE=$work/gocache
    mkdir -p "$HOME"
    nice -n 15 make WHAT=cmd/kube-apiserver
  ) >"$work/build.log" 2>&1 || { tail -n 30 "$work/build.log" >&2; die "the build failed"; }
  mkdir -p "$target"
  binary=$(find "$work/tree/_output" -name kube-apiserver -type f | head -n 1)
  [ -n "$binary" ] || { tail -n 30 "$work/build.log" >&2; die "the build left no kube-apiserver"; }
  strip -o "$target/kube-apiserver.part" "$binary" 2>/dev/null || cp "$binary" "$target/kube-apiserver.part"
  chmod 755 "$target/kube-apiserver.part"
  mv "$target/kube-apiserver.part" "$target/kube-apiserver"
  say "built $target/kube-apiserver"
}

free_port() {  # a port that nothing listens on, from $1 upwards
  p=$1
  while ss -Hltn "sport = :$p" | grep -q .; do p=$((p + 1)); done
  echo "$p"
}

stop() {  # ends the process whose id stands in a file, if it still is the program that was started
  [ -f "$1" ] || return 0
  pid=$(cat "$1"); rm -f "$1"
  case $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null) in *"$2"*) ;; *) return 0 ;; esac
  kill "$pid" 2>/dev/null || true
  for _ in $(seq 50); do [ -d "/proc/$pid" ] || return 0; sleep 0.1; done
  kill -9 "$pid" 2>/dev/null || true
}

down() {
  stop "$dir/apiserver.pid" kube-apiserver
  stop "$dir/etcd.pid" etcd
  rm -rf "$dir/etcd"
}

certificates() {
  local pki=$dir/pki
  rm -rf "$pki"; mkdir -p "$pki"
  key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1" 2>/dev/null; }
  key "$pki/ca.key"; key "$pki/server.key"
  openssl req -x509 -new -key "$pki/ca.key" -subj /CN=legorl-test-ca -days 2 -out "$pki/ca.crt" 2>/dev/null
  openssl req -new -key "$pki/server.key" -subj /CN=kube-apiserver -out "$pki/server.csr" 2>/dev/null
  printf 'subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth\n' >"$pki/server.ext"
  openssl x509 -req -in "$pki/server.csr" -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -CAcreateserial -days 2 \
    -extfile "$pki/server.ext" -out "$pki/server.crt" 2>/dev/null
  openssl genrsa -out "$pki/sa.key" 2048 2>/dev/null
  admin=$(openssl rand -hex 16) forbidden=$(openssl rand -hex 16) stranger=$(openssl rand -hex 16)
  printf '%s,admin,1,"system:masters"\n%s,nobody,2,"guests"\n' "$admin" "$forbidden" >"$pki/tokens.csv"
}

kubeconfig() {  # NAME PORT TOKEN CONTEXT
  cat >"$dir/$1.kubeconfig" <<CONFIG
apiVersion: v1
kind: Config
clusters:
- name: test
  cluster: {server: "https://127.0.0.1:$2", certificate-authority-data: $(base64 -w0 <"$dir/pki/ca.crt")}
users:
- name: someone
  user: {token: "$3"}
contexts:
- name: test
  context: {cluster: test, user: someone, namespace: default}
current-context: "$4"
CONFIG
  chmod 600 "$dir/$1.kubeconfig"
}

up() {
  [ -x "$target/kube-apiserver" ] || die "not built; run $0 build"
  down
  certificates
  etcd_port=$(free_port 22379); peer_port=$(free_port $((etcd_port + 1)))
  api_port=$(free_port $((peer_port + 1)))
  etcd --data-dir "$dir/etcd" --listen-client-urls "http://127.0.0.1:$etcd_port" \
    --advertise-client-urls "http://127.0.0.1:$etcd_port" --listen-peer-urls "http://127.0.0.1:$peer_port" \
    --initial-advertise-peer-urls "http://127.0.0.1:$peer_port" --initial-cluster "default=http://127.0.0.1:$peer_port" \
    --unsafe-no-fsync >"$dir/etcd.log" 2>&1 </dev/null &
  echo $! >"$dir/etcd.pid"
  # Without controllers nobody makes service accounts, so the plugin that asks for one is off.
  "$target/kube-apiserver" --etcd-servers="http://127.0.0.1:$etcd_port" --bind-address=127.0.0.1 \
    --advertise-address=192.0.2.2 --secure-port="$api_port" --cert-dir="$dir/pki" \
    --tls-cert-file="$dir/pki/server.crt" --tls-private-key-file="$dir/pki/server.key" \
    --client-ca-file="$dir/pki/ca.crt" --token-auth-file="$dir/pki/tokens.csv" \
    --service-account-issuer=https://localhost --service-account-key-file="$dir/pki/sa.key" \
    --service-account-signing-key-file="$dir/pki/sa.key" --service-cluster-ip-range=10.96.0.0/24 \
    --authorization-mode=RBAC --disable-admission-plugins=ServiceAccount >"$dir/apiserver.log" 2>&1 </dev/null &
  echo $! >"$dir/apiserver.pid"
  kubeconfig admin "$api_port" "$admin" test
  kubeconfig forbidden "$api_port" "$forbidden" test
  kubeconfig stranger "$api_port" "$stranger" test
  kubeconfig dead "$(free_port $((api_port + 1)))" "$admin" test
  kubeconfig nocontext "$api_port" "$admin" ""
  printf 'apiVersion: v1\nclusters: [unclosed\n' >"$dir/broken.kubeconfig"
  for _ in $(seq 600); do
    [ -d "/proc/$(cat "$dir/apiserver.pid")" ] || break
    if curl -sf --max-time 2 --cacert "$dir/pki/ca.crt" -H "Authorization: Bearer $admin" \
         "https://127.0.0.1:$api_port/api/v1/namespaces/default" >/dev/null; then
      echo "$api_port"; return
    fi
    sleep 0.1
  done
  say "kube-apiserver did not answer within 60 s"
  tail -n 15 "$dir/etcd.log" "$dir/apiserver.log" >&2
  down
  exit 1
}

case ${1:-} in
  build) build ;;
  built) [ -x "$target/kube-apiserver" ] && command -v etcd >/dev/null ;;
  up|down) [ $# -eq 2 ] || usage; mkdir -p "$2"; dir=$(readlink -f "$2"); "$1" ;;
  *) usage ;;
esac
