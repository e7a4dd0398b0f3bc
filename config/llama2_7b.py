"""
Llama 2 7B, as in the paper (arXiv 2307.09288): the shape, and what follows from it.

    python prepare_data.py config/llama2_7b.py --inputs='CRAWL/*.warc.gz'       documents
    python train_tokenizer.py config/llama2_7b.py                               a vocabulary of 32,000
    python prepare_data.py config/llama2_7b.py --inputs='CRAWL/*.warc.gz'       token shards
    torchrun --nproc_per_node=8 train.py config/llama2_7b.py                    one machine; four: runs/slurm.sh
"""
data_dir = "data/llama2_7b"
out_dir = "out/llama2_7b"

train_tokenizer = dict(vocab_size=32000)

train = dict(
    # Shape. The SwiGLU has three matrices where the older feed-forward had two of width 4 * n_embd. For the same number
    # of weights each is 2/3 as wide: 8/3 * 4096 = 10,922.7, and the next multiple of 256, which suits the tiles of a
    # matrix product, is 43 * 256 = 11,008. (Not 4 * 2048 rounded up, as is sometimes written: that would be 8,192.)
    # bench/width.py times it against 11,000.
    n_layer=32,
    n_head=32,                      # of 128 dimensions each
    n_kv_head=32,                   # plain multi-head attention; of the Llama 2 models only 34B and 70B group queries
    n_embd=4096,
    n_inner=11008,
    vocab_size=32000,
    block_size=4096,
    rope_theta=10000.0,
    norm_eps=1e-5,
    tie_embeddings=False,           # the matrix that embeds and the one that scores are two
    dropout=0.0,

    # Parameters:
    #   attention       4 * 4096 * 4096     =    67,108,864
    #   feed-forward    3 * 4096 * 11008    =   135,266,304
    #   two norms       2 * 4096            =         8,192
    #   one layer                               202,383,360    * 32 = 6,476,267,520
    #   embeddings      32000 * 4096        =   131,072,000    *  2 =   262,144,000
    #   last norm       4096                =         4,096    *  1 =         4,096
    #                                                                 6,738,415,616
    #
    # Memory of the states, which under DDP every GPU holds in full: fp32 weights, gradients and AdamW's two moments are
    # 16 bytes a parameter, 6,738,415,616 * 16 = 107.8 GB = 100.4 GiB. A GPU of 80 GB does not hold that, whatever the
    # batch. There the states must be sharded over the GPUs (FSDP2; 13.5 GB on each of 8), which train.py cannot do yet.

    # Optimisation, from the paper: 4 M tokens a step, warm-up 2000 steps, cosine to a tenth of the peak, clip 1.0.
    batch_tokens=1024 * 4096,       # 4,194,304: 1024 sequences, over 8 GPUs 128 each, one at a time
    micro_batch_size=1,
    max_steps=476838,               # 2 * 10^12 tokens / 4,194,304, rounded up
    learning_rate=3e-4,
    schedule="cosine",
    warmup_steps=2000,              # 0.4 % of the steps would be 1,907
    final_lr=0.1,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    grad_clip=1.0,

    # A gradient norm that leaps (6 deviations above the last 128, or above 5, that is five times what clipping lets
    # through): its step is skipped, which loses 4 M of 2 * 10^12 tokens. Ten in a row are more than an odd batch: the run
    # goes back to the full checkpoint before them, at most 1,000 steps, and leaves their data out; three times at most.
    on_spike="skip",

    log_every=10,
    eval_every=1000,
    save_light=1000,
    save_full=1000,
)
