#!/usr/bin/env bash
#SBATCH --job-name=teardown
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1          # one torchrun a node; it starts the eight processes
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96           # of the node: torchrun's processes share them
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.txt
#
# Four nodes of eight GPUs:
#
#   sbatch runs/slurm.sh                          config/llama2_7b.py
#   sbatch runs/slurm.sh config/mine.py --seed=2
#
# Before: .venv and the token shards on a file system that all nodes see (runs/demo.sh makes the first, prepare_data.py
# the second). After an interruption submit the same again: train.py continues from its newest sound full checkpoint.
# A requeued job does that by itself. When Slurm announces the end (SIGTERM), all processes finish the step and save. But
# torchrun kills them 30 seconds after it was told: where a save takes longer, let Slurm tell them earlier and without
# torchrun, `#SBATCH --signal=B:USR1@600` and a trap that sends SIGUSR1 to one train.py. A save that is cut off costs the
# work since the one before, nothing else.
set -eu
cd "${SLURM_SUBMIT_DIR:?submit this with sbatch}"

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
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}   # a dead rank ends the job, not hangs it

[ $# -gt 0 ] || set -- config/llama2_7b.py

srun --kill-on-bad-exit=1 .venv/bin/torchrun \
    --nnodes="$SLURM_NNODES" --nproc_per_node=8 \
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$host:$port" \
    train.py "$@"
