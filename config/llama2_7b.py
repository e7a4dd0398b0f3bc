"""
Llama 2 7B, as in the paper (arXiv 2307.09288): the shape, and what follows from it.

    python prepare_data.py config/llama2_7b.py --inputs='CRAWL/*.warc.gz'       documents
    python train_tokenizer.py config/llama2_7b.py                               a vocabulary of 32,000
    python prepare_data.py config/llama2_7b.py --inputs='CRAWL/*.warc.gz'       token shards
    python train.py config/llama2_7b.py --plan=8                                what it needs, without a GPU
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
    # Memory, on each of 8 GPUs of 80 GB (74.5 GiB), as --plan=8 has it: fp32 weights, gradients and AdamW's two
    # moments are 16 bytes a parameter, 6,738,415,616 * 16 = 107.8 GB = 100.4 GiB. Under DDP every GPU would hold
    # all of it. Sharded (ZeRO-3) it is 12.6 GiB; with 47.5 of activations, 3.2 of logits and 0.9 of gathered
    # weights 64.1 GiB, so that 6.4 are left beyond 4 that CUDA, NCCL and fragments may take. That is without
    # torch.compile, which keeps less.
    parallel="fsdp",
    zero=3,
    compile=True,                   # per block
    micro_batch_size=2,
    recompute="none",
    # Instead, GiB on a GPU and what it costs:
    # recompute="selective", micro_batch_size=2     36.6    the MLPs are computed twice, about a quarter more work
    # recompute="full", micro_batch_size=8          for blocks much longer than 4,096: everything twice, a third more
    # micro_batch_size=1                            38.8    weights travel twice as often for the same tokens
    # zero=2                                        75.8    weights travel once a step: with micro_batch_size=1, 50.5
    # hsdp=4, on four machines                      64.1    weights travel within a machine, only gradients between them
    # tp=4, pp=2, on eight machines                 config/llama2_7b_64gpu.py

    # Optimisation, from the paper: 4 M tokens a step, warm-up 2000 steps, cosine to a tenth of the peak, clip 1.0.
    batch_tokens=1024 * 4096,       # 4,194,304: 1024 sequences, over 8 GPUs 128 each, two at a time
    max_steps=500000,               # 2.1 * 10^12 tokens
    learning_rate=3e-4,
    schedule="cosine",
    warmup_steps=2000,
    final_lr=0.1,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    adam_eps=1e-5,
    grad_clip=1.0,

    # A gradient norm that leaps (6 deviations above the last 128, or above 5, that is five times what clipping lets
    # through): its step is skipped, which loses 4 M of 2.1 * 10^12 tokens. Ten in a row are more than an odd
    # batch: the run goes back to the full checkpoint before them, at most 5,000 steps, and leaves their data
    # out; three times at most.
    on_spike="skip",

    log_every=10,
    eval_every=1000,
    save_light=500,
    save_full=5000,                 # on 8 GPUs 70 hours; --plan=8 says what loses least
)
