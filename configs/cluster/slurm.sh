#!/bin/bash
#SBATCH --job-name=accrete
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --time=08:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=accrete-%j.log
#
# One run on Slurm: a Ray cluster over the nodes of the job, the driver on the first of them. Submit
# it from the checkout, in a folder that all nodes see, after `make setup`:
#   sbatch configs/cluster/slurm.sh configs/demo.yaml --set storage=/shared/accrete \
#       --set cluster.cache=/tmp --set cluster.workers=2 --set cluster.gpus_per_worker=1
# Before a preemption and before the time limit Slurm sends USR1: the driver saves checkpoints and
# ends, and the job is put back into the queue. `scancel` ends it for good. Tried on Slurm 22.05
# with two nodes on one machine, without GPUs.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
python=${ACCRETE_PYTHON:-.venv/bin/python}
ray=${ACCRETE_RAY:-.venv/bin/ray}
steps=() driver='' preempted=''

folder=$PWD/.ray-$SLURM_JOB_ID
rm -rf "$folder"  # of an earlier start of this job that was killed
(umask 077 && mkdir "$folder" &&
    "$python" -c 'import secrets; print(secrets.token_hex(32))' > "$folder/token")

finish() {
    code=$?
    trap - EXIT
    trap '' USR1 TERM INT
    [ -z "$driver" ] || kill -TERM "$driver" 2> /dev/null || :
    [ -z "$driver" ] || wait "$driver" || :
    touch "$folder/end"
    for _ in {1..60}; do
        running=
        for step in "${steps[@]}"; do kill -0 "$step" 2> /dev/null && running=yes; done
        [ -n "$running" ] || break
        sleep 1
    done
    for step in "${steps[@]}"; do kill -TERM "$step" 2> /dev/null || :; done
    wait
    rm -rf "$folder"
    if [ -n "$preempted" ] && [ "$code" -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID" || :; fi
    exit "$code"
}
trap finish EXIT
trap 'preempted=yes; exit 143' USR1
trap 'exit 143' TERM INT

# Whoever reaches Ray's ports needs its token. The ports are free ones: nodes may be shared by jobs.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$folder/token RAY_USAGE_STATS_ENABLED=0
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # nothing is served, so nothing is drained
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -ra addresses <<< "$(hostname --ip-address) $(hostname --all-ip-addresses)"
ip=${addresses[0]}
for address in "${addresses[@]}"; do
    case $address in
        127.* | *:*) ;;  # other nodes cannot reach a loopback address; Ray wants IPv4
        *) ip=$address; break ;;
    esac
done
read -r port dashboard client < <("$python" -c 'import socket
probes = [socket.socket() for _ in range(3)]
[probe.bind(("", 0)) for probe in probes]
print(*(probe.getsockname()[1] for probe in probes))')

# The task of each node: Ray, until the file `end` appears. A task that ends by itself with code 0
# is a success to srun; one that srun has to signal is an error, also at the end of a good run.
task='"$@" &
ray=$!
trap "kill -TERM $ray" TERM
while kill -0 "$ray" 2> /dev/null; do
    if [ -e "$0" ]; then
        kill -TERM "$ray"
        wait "$ray"
        exit 0
    fi
    sleep 1
done
wait "$ray"'
cpus=${SLURM_CPUS_PER_TASK:-1}
step=(srun --overlap --ntasks-per-node=1 --cpus-per-task="$cpus")  # srun does not inherit sbatch's
start=(bash -c "$task" "$folder/end" "$ray" start --block --num-cpus="$cpus")

fail() {
    echo "accrete: $1" >&2
    exit 1
}
all_steps_run() {
    for step_process in "${steps[@]}"; do
        kill -0 "$step_process" 2> /dev/null || fail "Ray did not start on a node; see above"
    done
}

"${step[@]}" --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" "${start[@]}" --head \
    --node-ip-address="$ip" --port="$port" --dashboard-host=127.0.0.1 \
    --dashboard-port="$dashboard" --ray-client-server-port="$client" &
steps+=($!)
answers=
for _ in {1..60}; do
    all_steps_run
    if "$ray" health-check --address "$ip:$port" > /dev/null 2>&1; then answers=yes; break; fi
    sleep 2
done
[ -n "$answers" ] || fail "Ray's head on ${nodes[0]} does not answer at $ip:$port"

if [ "${#nodes[@]}" -gt 1 ]; then
    others=$((${#nodes[@]} - 1))
    "${step[@]}" --nodes="$others" --ntasks="$others" --exclude="${nodes[0]}" "${start[@]}" \
        --address="$ip:$port" &
    steps+=($!)
fi
count_nodes='import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
sys.exit(sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]))'
joined=
for _ in {1..60}; do
    all_steps_run
    if "$python" -c "$count_nodes" "$ip:$port" "${#nodes[@]}" 2> /dev/null; then
        joined=yes
        break
    fi
    sleep 2
done
[ -n "$joined" ] ||
    fail "not all of ${nodes[*]} joined Ray at $ip:$port; look for a firewall between them"

RAY_ADDRESS=$ip:$port "$python" -m pipeline run "$@" &
driver=$!
trap 'preempted=yes; kill -TERM "$driver" 2> /dev/null || :' USR1
trap 'kill -TERM "$driver" 2> /dev/null || :' TERM INT
while kill -0 "$driver" 2> /dev/null; do wait "$driver" || :; done  # a signal ends `wait` too
code=0
wait "$driver" || code=$?
driver=
exit "$code"
