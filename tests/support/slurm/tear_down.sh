#!/usr/bin/env bash
# Ends what set_up.sh DIR started: jobs with all of their processes, then the daemons.  DIR itself stays.
set -uo pipefail

dir=$(cd "$1" && pwd)
# shellcheck source=/dev/null
source "$dir/environment"
scancel --signal=KILL --full --user "$(id -un)" 2>/dev/null
scancel --user "$(id -un)" 2>/dev/null
for ((tries = 0; tries < 150; tries++)); do
    [[ -z $(squeue --noheader 2>/dev/null) ]] && break
    sleep 0.1
done
for program in slurmctld slurmd-n1 slurmd-n2 slurmd-n3 munged; do
    [[ -s $dir/$program.pid ]] && kill -KILL "$(cat "$dir/$program.pid")" 2>/dev/null
done
exit 0
