"""
TinyLlama 1.1B (Zhang et al. 2024, arXiv 2401.02385): Llama 2's shape made small, with queries in groups of eight.

    torchrun --nproc_per_node=8 train.py config/tinyllama_1b.py                            from random weights
    torchrun --nproc_per_node=8 train.py config/tinyllama_1b.py --init_from=DIR        from its Hugging Face folder

Data and tokenizer as in config/llama2_7b.py.
"""
data_dir = "data/tinyllama_1b"
out_dir = "out/tinyllama_1b"

train_tokenizer = dict(vocab_size=32000)

train = dict(
    # 8/3 * 2048 = 5,461.3; the next multiple of 256 is 22 * 256 = 5,632.
    n_layer=22,
    n_head=32,                      # of 64 dimensions each
    n_kv_head=4,                    # the cache of keys and values is an eighth
    n_embd=2048,
    n_inner=5632,
    vocab_size=32000,
    block_size=2048,
    rope_theta=10000.0,
    norm_eps=1e-5,
    tie_embeddings=False,

    # Parameters:
    #   q and o         2 * 2048 * 2048     =   8,388,608
    #   k and v         2 * 2048 * 256      =   1,048,576    (4 heads of 64)
    #   feed-forward    3 * 2048 * 5632     =  34,603,008
    #   two norms       2 * 2048            =       4,096
    #   one layer                              44,044,288    * 22 =   968,974,336
    #   embeddings      32000 * 2048        =  65,536,000    *  2 =   131,072,000
    #   last norm       2048                =       2,048    *  1 =         2,048
    #                                                               1,100,048,384
    # States: 16 bytes a parameter, 17.6 GB: a single GPU of 24 GB holds them, with little left for activations.

    # Optimisation, from the paper: 2 M tokens a step, 3 * 10^12 tokens.
    batch_tokens=1024 * 2048,
    micro_batch_size=8,
    max_steps=1430512,              # 3 * 10^12 / 2,097,152, rounded up
    learning_rate=4e-4,
    warmup_steps=2000,
    final_lr=0.1,
    weight_decay=0.1,
    grad_clip=1.0,

    log_every=10,
    eval_every=1000,
    save_light=5000,
    save_full=1000,
)
