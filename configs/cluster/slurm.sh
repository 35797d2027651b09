#!/bin/bash
#SBATCH --job-name=accrete
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --time=08:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --output=accrete-%j.log
#
# A run on Slurm: a Ray cluster over the job's nodes, the driver on the first, everything stopped at the end. From the checkout, in a folder
# that all nodes see, after `make setup`:
#   sbatch configs/cluster/slurm.sh configs/real7-vit-tiny.yaml --set storage=/shared/accrete --set cluster.cache=/tmp --set cluster.workers=2 --set cluster.gpus_per_worker=1
# What finished is kept: submit the same again to go on. Written for this; tried with stand-ins for srun, ray and the driver, not on Slurm yet.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
python=${ACCRETE_PYTHON:-.venv/bin/python}
ray=${ACCRETE_RAY:-.venv/bin/ray}
steps=() driver=

own=$PWD/.ray-$SLURM_JOB_ID
(umask 077 && mkdir -p "$own" && "$python" -c 'import secrets; print(secrets.token_hex(32))' > "$own/token")
finish() {
    trap - EXIT
    for process in $driver "${steps[@]}"; do kill -TERM "$process" 2> /dev/null || :; done
    wait
    rm -rf "$own"
}
trap finish EXIT
trap 'exit 143' USR1 TERM INT

# Ray's token, without which nobody who reaches the ports can use them; ports that no other job on these nodes has.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$own/token RAY_USAGE_STATS_ENABLED=0
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
ip=$(hostname --ip-address)
ip=${ip%% *}
read -r port dashboard client < <("$python" -c 'import socket
probes = [socket.socket() for _ in range(3)]
[probe.bind(("", 0)) for probe in probes]
print(*(probe.getsockname()[1] for probe in probes))')

start=("$ray" start --block --num-cpus="${SLURM_CPUS_PER_TASK:-1}")
srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" "${start[@]}" --head --node-ip-address="$ip" --port="$port" \
    --dashboard-host=127.0.0.1 --dashboard-port="$dashboard" --ray-client-server-port="$client" &
steps+=($!)
if [ "${#nodes[@]}" -gt 1 ]; then
    others=$((${#nodes[@]} - 1))
    srun --overlap --nodes="$others" --ntasks="$others" --exclude="${nodes[0]}" "${start[@]}" --address="$ip:$port" &
    steps+=($!)
fi

up=
for _ in {1..60}; do
    for step in "${steps[@]}"; do kill -0 "$step" 2> /dev/null || { echo "accrete: Ray did not start on a node; see above" >&2; exit 1; }; done
    if "$python" -c 'import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
sys.exit(sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]))' "$ip:$port" "${#nodes[@]}" 2> /dev/null; then up=yes; break; fi
    sleep 2
done
[ -n "$up" ] || { echo "accrete: not all of ${nodes[*]} joined Ray at $ip:$port; look for a firewall between them" >&2; exit 1; }

RAY_ADDRESS=$ip:$port "$python" -m pipeline run "$@" &
driver=$!
trap 'kill -TERM "$driver" 2> /dev/null || :' USR1 TERM INT  # a notice that the nodes are taken away: the driver ends, its checkpoints stand
while kill -0 "$driver" 2> /dev/null; do wait "$driver" || :; done  # a signal ends `wait`, not the driver
wait "$driver" || exit "$?"
