#!/bin/bash
#SBATCH --job-name=accrete-demo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=8G
#SBATCH --time=08:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=accrete-demo-%j.log
#
# One run on Slurm: a Ray cluster over the nodes of the job, the driver on the first of them. Written
# by `accrete launch --on slurm`, with a config beside it. Submit it from the checkout, in a folder
# that all nodes see, after `make setup`:
#   sbatch configs/cluster/slurm.sh configs/demo.yaml --set storage=/shared/accrete --set cluster.cache=/tmp
# Options of sbatch on the command line override those above. In a job array, the index of a job is
# its seed. Nodes of several kinds are components of a heterogeneous job; the driver runs on the first
# component:
#   sbatch --nodes=1 --cpus-per-task=4 : --nodes=2 --cpus-per-task=8 --gpus-per-node=1 slurm.sh CONFIG
# Before a preemption and before the time limit, Slurm sends USR1. The driver then saves checkpoints
# and exits, and the job returns to the queue. `scancel` ends the job. Ray's own output is in
# ray-JOB.log, which is deleted if the run succeeds. Tested with Slurm 22.05 and two nodes on one
# machine, without GPUs.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
python=${ACCRETE_PYTHON:-.venv/bin/python}
ray=${ACCRETE_RAY:-.venv/bin/ray}
steps=() sizes=() driver='' preempted=''

folder=$PWD/.ray-$SLURM_JOB_ID
log=$PWD/ray-$SLURM_JOB_ID.log
temporary=/tmp/ray-$SLURM_JOB_ID  # Ray's files on each node; the default folder may be another user's

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
    if [ "$code" -eq 0 ]; then rm -f "$log"; fi
    if [ -n "$preempted" ] && [ "$code" -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID" || :; fi
    exit "$code"
}
trap finish EXIT
trap 'preempted=yes; exit 143' USR1
trap 'exit 143' TERM INT
rm -rf "$folder"  # left by an earlier start of this job that was killed
(umask 077 && mkdir "$folder" &&
    "$python" -c 'import secrets; print(secrets.token_hex(32))' > "$folder/token")

# Each connection to Ray needs the token. The ports are free ones, because jobs can share a node.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$folder/token RAY_USAGE_STATS_ENABLED=0
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # nothing is served, so nothing is drained
value_of() {  # print the value of a Slurm variable for a component of the job
    name=$1${SLURM_HET_SIZE:+_HET_GROUP_$2}
    echo "${!name:-}"
}
nodes=()
for ((component = 0; component < ${SLURM_HET_SIZE:-1}; component++)); do
    list=$(value_of SLURM_JOB_NODELIST "$component")
    mapfile -t of_component < <(scontrol show hostnames "$list")
    nodes+=("${of_component[@]}")
    sizes+=("${#of_component[@]}")
done
read -ra addresses <<< "$(hostname --ip-address) $(hostname --all-ip-addresses)"
ip=${addresses[0]}
for address in "${addresses[@]}"; do
    case $address in
        127.* | *:*) ;;  # other nodes cannot reach a loopback address; Ray wants IPv4
        *) ip=$address; break ;;
    esac
done
# Each job has its own ports, below the range from which the kernel chooses, because several jobs can
# start on a node at the same moment.
read -r port dashboard client < <("$python" -c 'import socket, sys
first = 20000 + int(sys.argv[1]) * 8 % 12000
free = []
for port in range(first, first + 8):
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            continue
    free.append(port)
print(*free[:3])' "$SLURM_JOB_ID")

# The task of each node: run Ray until the file `end` exists. Each task then exits with code 0 by
# itself, because srun reports a task that it has to signal as failed, even after a successful run.
task='temporary=$1
shift
trap "rm -rf $temporary" EXIT
"$@" --temp-dir="$temporary" &
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
# start_ray COMPONENT COUNT [SRUN OPTION ...] -- [RAY OPTION ...]: start Ray on COUNT nodes.
start_ray() {
    component=$1 count=$2 choice=()
    shift 2
    while [ "$1" != -- ]; do choice+=("$1"); shift; done
    shift
    cpus=$(value_of SLURM_CPUS_PER_TASK "$component")  # srun does not inherit it from sbatch
    if [ -n "${SLURM_HET_SIZE:-}" ]; then choice+=(--het-group="$component"); fi
    # Export all variables, even if the job was submitted with --export: Ray needs those of the token.
    srun --export=ALL --overlap --ntasks-per-node=1 --cpus-per-task="${cpus:=1}" \
        --nodes="$count" --ntasks="$count" "${choice[@]}" \
        bash -c "$task" "$folder/end" "$temporary" "$ray" start --block \
        --num-cpus="$cpus" --dashboard-agent-listen-port=0 "$@" >> "$log" 2>&1 &
    steps+=($!)
}

fail() {
    tail -n 40 "$log" >&2 || :
    echo "accrete: $1" >&2
    exit 1
}
all_steps_run() {
    for step_process in "${steps[@]}"; do
        kill -0 "$step_process" 2> /dev/null || fail "Ray did not start on a node; see above"
    done
}

start_ray 0 1 --nodelist="${nodes[0]}" -- --head --node-ip-address="$ip" --port="$port" \
    --dashboard-host=127.0.0.1 --dashboard-port="$dashboard" --ray-client-server-port="$client"
answers=
for _ in {1..60}; do
    all_steps_run
    if "$ray" health-check --address "$ip:$port" > /dev/null 2>&1; then answers=yes; break; fi
    sleep 2
done
[ -n "$answers" ] || fail "Ray's head on ${nodes[0]} does not answer at $ip:$port"

if [ "${sizes[0]}" -gt 1 ]; then
    start_ray 0 $((sizes[0] - 1)) --exclude="${nodes[0]}" -- --address="$ip:$port"
fi
for ((component = 1; component < ${#sizes[@]}; component++)); do
    start_ray "$component" "${sizes[component]}" -- --address="$ip:$port"
done
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

if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then set -- "$@" --set "seeds=[$SLURM_ARRAY_TASK_ID]"; fi
is_ending='' is_signalled=''
end_driver() {  # send one signal: a second one would end the driver before it has saved
    [ -n "$driver" ] && [ -z "$is_signalled" ] || return 0
    is_signalled=yes
    kill -TERM "$driver" 2> /dev/null || :
}
trap 'preempted=yes is_ending=yes; end_driver' USR1
trap 'is_ending=yes; end_driver' TERM INT
RAY_ADDRESS=$ip:$port "$python" -m pipeline run "$@" &
driver=$!
[ -z "$is_ending" ] || end_driver  # the signal came while the driver started
while kill -0 "$driver" 2> /dev/null; do wait "$driver" || :; done  # a signal also ends `wait`
code=0
wait "$driver" || code=$?
driver=
exit "$code"
