#!/usr/bin/env bash
# A Slurm of three nodes on this machine, for tests: set_up.sh DIR, and later tear_down.sh DIR.
#
# munged, slurmctld and three slurmd (n1 n2 n3, at 127.0.0.2 to 127.0.0.4, two CPUs each whatever the machine has).
# All state, logs and sockets are in DIR; ports are free ones.  Partitions: `main`, and `low`, whose jobs are requeued
# with 60 s of grace when `main` wants their nodes.  DIR/environment is to be sourced by who wants to use it.
#
# Slurm is the system's, or Debian's packages unpacked beside this script's caller (SLURM_CACHE, .venv/slurm): nothing
# is installed.  Exit code 77: there is neither Slurm nor apt.
set -euo pipefail

dir=$(mkdir -p "$1" && cd "$1" && pwd)
cache=${SLURM_CACHE:-$(cd "$(dirname "$0")/../../.." && pwd)/.venv/slurm}
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 liblua5.1-0)

fetch() {
    command -v apt-get dpkg-deb >/dev/null || { echo "neither Slurm nor apt is here" >&2; exit 77; }
    local new
    new=$(mktemp -d "$cache.XXXXXX")
    (
        cd "$new"
        apt-get -qq download "${packages[@]}" 2>download.log ||
            { apt-get -qq update && apt-get -qq download "${packages[@]}"; } 2>>download.log ||
            { cat download.log >&2; echo "apt has no Slurm" >&2; exit 77; }
        for package in *.deb; do dpkg-deb -x "$package" .; done
        rm ./*.deb
        for program in slurmctld slurmd slurmstepd; do ln -s "$program-wlm" "usr/sbin/$program"; done
    )
    mv -T "$new" "$cache" 2>/dev/null || rm -rf "$new" # another was faster
}

free_ports() { # of COUNT, one a line
    python3 -c 'import socket, sys
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*[each.getsockname()[1] for each in held], sep="\n")' "$1"
}

if [[ -x /usr/sbin/slurmctld && -x /usr/sbin/slurmd && -x /usr/sbin/munged ]]; then
    library="" paths=/usr/sbin: plugins="" stepd=()
else
    [[ -d $cache ]] || fetch
    library=$(echo "$cache"/usr/lib/*/slurm-wlm)
    paths=$cache/usr/bin:$cache/usr/sbin: plugins="PluginDir=$library" stepd=(-d "$cache/usr/sbin/slurmstepd")
    library=$library:${library%/*}
fi
mapfile -t ports < <(free_ports 4)
mkdir -p "$dir"/{state,spool,log,munge}
chmod 700 "$dir/munge"
cat >"$dir/environment" <<EOT
export PATH="$paths\$PATH" LD_LIBRARY_PATH="$library\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
export SLURM_CONF="$dir/slurm.conf"
EOT
# shellcheck source=/dev/null
source "$dir/environment"

user=$(id -un)
# cred_expire is also how long a job waits before it begins again.  Where a node was lost, its last steps end within 15 s;
# a new attempt's steps have the same numbers, and would end with them.  Slurm's own is 120.
cat >"$dir/slurm.conf" <<EOT
ClusterName=test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=20
CredType=cred/munge
$plugins
SlurmctldPort=${ports[3]}
FirstJobId=$((1000 + RANDOM))
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/%n
SlurmdDebug=debug
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout=20
KillWait=60
OverTimeLimit=0
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.2 Port=${ports[0]} CPUs=2 RealMemory=4096 State=UNKNOWN
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.3 Port=${ports[1]} CPUs=2 RealMemory=4096 State=UNKNOWN
NodeName=n3 NodeHostname=$(hostname -s) NodeAddr=127.0.0.4 Port=${ports[2]} CPUs=2 RealMemory=4096 State=UNKNOWN
PartitionName=main Nodes=n[1-3] Default=YES MaxTime=60 PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=n[1-3] MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
EOT

dd if=/dev/urandom of="$dir/munge/key" bs=1 count=1024 status=none
chmod 400 "$dir/munge/key"
munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munged.pid" \
    --log-file="$dir/log/munged" --seed-file="$dir/munge/seed"
slurmctld -i
for node in n1 n2 n3; do slurmd -N "$node" "${stepd[@]}"; done
for ((tries = 0; tries < 300; tries++)); do
    [[ $(sinfo --noheader --partition main --states idle --format %D 2>/dev/null) == 3 ]] && exit 0
    sleep 0.1
done
echo "the nodes did not come up within 30 s:" >&2
tail -n 5 "$dir"/log/* >&2
exit 1
