#!/usr/bin/env bash
# A private Slurm of two nodes on this machine, for tests. Needs root, Linux namespaces and Debian's Slurm.
#
#   slurm.sh up DIR      start munged, slurmctld and two slurmd; prints the value for SLURM_CONF
#   slurm.sh down DIR    end them and delete network namespaces, bridge and files
#   slurm.sh run DIR CMD…   run a command with SLURM_CONF set
#
# Each node is a network namespace with its own address, host name and /dev/shm, so that MPI sees two
# machines. Names and subnet are derived from DIR, so that two test runs do not meet. Leftovers of an
# earlier run in the same DIR are removed first; a start that takes more than 30 s prints the logs.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,9p' "$0"; exit 2; }
verb=$1; mkdir -p "$2"; dir=$(readlink -f "$2"); shift 2
id=$(printf '%s' "$dir" | cksum | cut -d' ' -f1)
tag=$(printf '%05x' $((id % 1048576)))           # bridge lrb<tag>, namespaces lr<tag>n1 and n2
net="10.$((64 + id % 60)).$((id / 60 % 250))"    # a /24 of the private range
bridge=lrb$tag
conf=$dir/slurm.conf

down() {
  for pid_file in "$dir"/run/slurmd.*.pid "$dir"/run/slurmctld.pid "$dir"/run/munged.pid; do
    [ -f "$pid_file" ] || continue
    pid=$(cat "$pid_file"); kill "$pid" 2>/dev/null || true
    for _ in $(seq 50); do [ -d "/proc/$pid" ] || break; sleep 0.1; done
    [ -d "/proc/$pid" ] && kill -9 "$pid" 2>/dev/null || true
    rm -f "$pid_file"
  done
  for i in 1 2; do
    # slurmstepd and tasks of a job that was still running live in the namespace
    ip netns pids "lr${tag}n$i" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns del "lr${tag}n$i" 2>/dev/null || true
    ip link del "lrv${tag}$i" 2>/dev/null || true
  done
  ip link del "$bridge" 2>/dev/null || true
}

free_port() {  # a port that nothing listens on, from $1 upwards
  p=$1
  while ss -Hltn "sport = :$p" | grep -q .; do p=$((p + 1)); done
  echo "$p"
}

up() {
  down
  rm -rf "$dir"/{run,log,state,spool,tmp}
  mkdir -p "$dir"/{run,log,state,spool/node1,spool/node2,tmp/node1,tmp/node2}
  chmod 755 "$dir" "$dir/run"
  # a private key and socket: the machine's own MUNGE, if any, is not touched
  (umask 077; head -c 1024 /dev/urandom >"$dir/run/munge.key")
  munged --force --key-file="$dir/run/munge.key" --socket="$dir/run/munge.sock" --pid-file="$dir/run/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/run/munge.seed"
  ctld_port=$(free_port 16817)
  cat >"$conf" <<CONF
ClusterName=legorl$tag
SlurmctldHost=$(hostname)($net.1)
SlurmctldPort=$ctld_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
TmpFS=$dir/tmp/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
JobCompType=jobcomp/none
MailProg=/bin/true
KillWait=5
MinJobAge=300
InactiveLimit=0
SlurmdTimeout=10
JobRequeue=1
NodeName=node1 NodeHostname=node1 NodeAddr=$net.11 Port=17001 CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 State=UNKNOWN
NodeName=node2 NodeHostname=node2 NodeAddr=$net.12 Port=17001 CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 State=UNKNOWN
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
CONF
  ip link add "$bridge" type bridge
  ip addr add "$net.1/24" dev "$bridge"
  ip link set "$bridge" up
  SLURM_CONF=$conf slurmctld -f "$conf"
  for i in 1 2; do
    ns=lr${tag}n$i
    ip netns add "$ns"
    ip link add "lrv${tag}$i" type veth peer name eth0 netns "$ns"
    ip link set "lrv${tag}$i" master "$bridge" up
    ip -n "$ns" addr add "$net.1$i/24" dev eth0
    ip -n "$ns" link set eth0 up
    ip -n "$ns" link set lo up
    # not `ip netns exec`: it would mount another /sys, in which slurmd finds no cgroups
    nsenter --net="/run/netns/$ns" unshare --uts --mount --propagation private bash -c \
      "hostname node$i; mount -t tmpfs tmpfs /dev/shm; SLURM_CONF='$conf' exec slurmd -f '$conf' -N node$i"
  done
  for _ in $(seq 300); do
    [ "$(SLURM_CONF=$conf sinfo -h -t idle -o %D 2>/dev/null)" = 2 ] && { echo "$conf"; return; }
    sleep 0.1
  done
  echo "slurm.sh: the two nodes were not idle after 30 s" >&2
  SLURM_CONF=$conf sinfo -N >&2 || true
  tail -n 15 "$dir"/log/*.log >&2
  down
  exit 1
}

case $verb in
  up) up ;;
  down) down ;;
  run) SLURM_CONF=$conf exec "$@" ;;
  *) sed -n '2,9p' "$0"; exit 2 ;;
esac
