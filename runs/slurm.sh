#!/usr/bin/env bash
#SBATCH --job-name=teardown
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1          # one torchrun a node; it starts the eight processes
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96           # of the node: torchrun's processes share them
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=USR1@600            # ten minutes before the time is up; to the tasks, not to this script
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.txt
#
# Four nodes of eight GPUs; `sbatch --nodes=1` for one:
#
#   sbatch runs/slurm.sh                          config/llama2_7b.py
#   sbatch runs/slurm.sh config/mine.py --seed=2
#
# Before: .venv and the token shards on a file system that all nodes see (runs/demo.sh makes the first, prepare_data.py
# the second). When the time is nearly up, all processes finish their step, save and leave, and the job is put into the
# queue again by itself. After any other interruption submit the same again: train.py continues from its newest sound full
# checkpoint. A process that dies is started again, with all others, up to three times (RESTARTS=0 sbatch ...: never).
set -eu
cd "${SLURM_SUBMIT_DIR:?submit this with sbatch}"
[ $# -gt 0 ] || set -- config/llama2_7b.py

# Where the run is; and what is wrong with the settings is said now, not by 32 processes.
out=$(.venv/bin/python -c 'import sys; from configurator import configure
print(configure({"__file__": "train.py"}, sys.argv[1:]).out_dir)' "$@")

# torchrun gives every process its RANK, LOCAL_RANK and WORLD_SIZE; nothing of that is set by hand, and the same command
# runs on every node. The first node is only where they meet. The port is for meeting, too: NCCL then talks over ports
# of its own that the kernel picks, so opening this one in a firewall is not enough.
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))      # two jobs whose first node is the same do not collide

# NCCL finds its way by itself; set what follows only when it does not, and look at what NCCL_DEBUG=INFO says then.
#   NCCL_SOCKET_IFNAME=eth0    which network interface to meet on, when a node has several and the wrong one is taken
#   NCCL_IB_HCA=mlx5_0,...     which InfiniBand or RoCE cards
#   NCCL_IB_DISABLE=1          gives up RDMA for TCP: tells whether InfiniBand is the trouble; no setting to keep
# There is no switch NCCL_VERSION (NCCL comes inside the torch wheel), and CUDA_VISIBLE_DEVICES is for one node only.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}   # a dead rank ends the job, after the flight recorder

# Slurm signals the task, which is this inner shell. torchrun would die of USR1, so the shell gives it to the processes;
# SIGTERM (scancel, preemption) goes to torchrun, which passes it on and kills after 30 seconds. One process that hears of it
# is enough: they all agree. A trap ends `wait` early, hence the loop.
node='
    "$@" & torchrun=$!
    trap "pkill -USR1 -P $torchrun" USR1
    trap "kill -TERM $torchrun" TERM
    while code=0; wait $torchrun || code=$?; kill -0 $torchrun 2>/dev/null; do :; done
    exit $code'

rm -f "$out/pretrain/requeue"
code=0
srun --kill-on-bad-exit=1 bash -c "$node" node .venv/bin/torchrun \
    --nnodes="$SLURM_NNODES" --nproc_per_node="${SLURM_GPUS_ON_NODE:-8}" --max-restarts="${RESTARTS:-3}" \
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$host:$port" \
    train.py --leave_within=300 "$@" || code=$?

# torchrun makes 1 of every exit status, 75 ("try again") too; so train.py leaves a note when it was asked to leave and has saved.
if [ $code -ne 0 ] && [ -e "$out/pretrain/requeue" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
