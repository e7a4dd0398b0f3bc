"""
Llama 2 7B on 64 GPUs, eight machines of eight: the same training as config/llama2_7b.py, laid out otherwise.

    python train.py config/llama2_7b_64gpu.py --plan=64
    torchrun --nnodes=8 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/llama2_7b_64gpu.py
"""
import runpy
from pathlib import Path

_eight = runpy.run_path(str(Path(__file__).with_name("llama2_7b.py")))
data_dir = _eight["data_dir"]
out_dir = "out/llama2_7b_64gpu"

train_tokenizer = _eight["train_tokenizer"]

train = dict(
    _eight["train"],

    # 64 = pp 2 x dp 8 x tp 4. Ranks are counted tp first: a group of four that shares each matrix, and so talks in
    # every layer, sits in one machine, two of them a machine. The eight that share states lie in four machines; between
    # the two stages there is one machine's border, and only hidden states cross it.
    pp=2,                           # 16 layers each
    tp=4,                           # 8 heads each, and 2,752 of the MLP's 11,008
    zero=2,                         # a stage's weights stay gathered: 1.7 GB in bf16, so they travel once a step
    micro_batch_size=2,             # 64 micro-batches a step: 1.5 % of it the pipeline fills and empties
    # Instead: dp 64 alone (pp=1, tp=1, hsdp=8) needs more memory and no traffic within layers. Of a 7B it is usually
    # the faster one; stages and shared matrices are for models that do not fit otherwise.
)
