"""
Llama 3 8B (arXiv 2407.21783): against Llama 2 7B, four times the vocabulary, a wider feed-forward, grouped queries.

    torchrun --nproc_per_node=8 train.py config/llama3_8b.py
    torchrun --nproc_per_node=8 train.py config/llama3_8b.py --init_from=DIR        from its Hugging Face folder

Llama 3.1 is the same with a context of 131,072 that RoPE's scaling reaches; from the folder of 3.0:

    --init_from=DIR --block_size=16384 --rope_scaling="{'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0,
    'high_freq_factor': 4.0}"
"""
data_dir = "data/llama3_8b"
out_dir = "out/llama3_8b"

train_tokenizer = dict(vocab_size=128256)

train = dict(
    # 8/3 * 4096 = 10,922 is not what stands here: Meta multiplies it by 1.3 first (as for Llama 2 70B), which gives
    # 14,198, and rounds up to a multiple of 1,024: 14 * 1,024 = 14,336 = 3.5 * 4096. What grouped queries save of k and
    # v 25 million weights a layer, is spent on the feed-forward, 41 million.
    n_layer=32,
    n_head=32,                      # of 128 dimensions each
    n_kv_head=8,
    n_embd=4096,
    n_inner=14336,
    vocab_size=128256,              # 128,000 tokens and 256 special ones; 1002 * 128
    block_size=8192,
    rope_theta=500000.0,            # the slowest pair comes round in 2.6 million tokens; with 10,000 it is 54 thousand
    norm_eps=1e-5,
    tie_embeddings=False,           # Llama 3.2's 1B and 3B tie them: there they would be a fifth of all

    # Parameters:
    #   q and o         2 * 4096 * 4096     =    33,554,432
    #   k and v         2 * 4096 * 1024     =     8,388,608    (8 heads of 128)
    #   feed-forward    3 * 4096 * 14336    =   176,160,768
    #   two norms       2 * 4096            =         8,192
    #   one layer                               218,112,000    * 32 = 6,979,584,000
    #   embeddings      128256 * 4096       =   525,336,576    *  2 = 1,050,673,152
    #   last norm       4096                =         4,096    *  1 =         4,096
    #                                                                 8,030,261,248
    # States: 16 bytes a parameter, 128.5 GB: sharded over the GPUs (FSDP2), 16.1 GB on each of 8. The logits of one
    # sequence of 8,192 tokens are 8192 * 128256 * 4 bytes = 4.2 GB in fp32, and their gradient as much again.

    # Optimisation: the peak is the 8B's in the paper; warm-up, number of steps and last rate are those of its 405B. Its
    # batches grow from 4 to 16 M tokens, here they stay.
    batch_tokens=512 * 8192,
    micro_batch_size=1,
    max_steps=1200000,
    learning_rate=3e-4,
    warmup_steps=8000,
    final_lr=0.01,
    weight_decay=0.1,
    grad_clip=1.0,

    log_every=10,
    eval_every=1000,
    save_light=1000,
    save_full=1000,
)
