"""
Phi-3 mini, 4k (arXiv 2404.14219): Llama 2's block with Llama 2's vocabulary, in another form of file.

    torchrun --nproc_per_node=8 train.py config/phi3_mini.py
    torchrun --nproc_per_node=8 train.py config/phi3_mini.py --init_from=DIR        from its Hugging Face folder

Its files hold q, k and v as one matrix, gate and up as another; they are split when they are read and joined when they
are written (engine/hf.py). The 128k variant differs in the window and in rope_scaling 'longrope', with 48 divisors for
short texts and 48 for long ones, which only its folder can say: --init_from.
"""
data_dir = "data/phi3_mini"
out_dir = "out/phi3_mini"

train_tokenizer = dict(vocab_size=32064)

train = dict(
    # 8/3 * 3072 = 8,192 exactly, a power of 2: 3072 = 3 * 1024.
    n_layer=32,
    n_head=32,                      # of 96 dimensions each
    n_kv_head=32,
    n_embd=3072,
    n_inner=8192,
    vocab_size=32064,               # Llama 2's 32,000, its own special tokens, filled up to 501 * 64
    block_size=4096,
    sliding_window=2047,            # each token sees itself and 2,046 before it; 32 layers reach further
    rope_theta=10000.0,
    norm_eps=1e-5,
    tie_embeddings=False,
    family="phi3",                  # without this it would be written as a Mistral, which computes the same

    # Parameters:
    #   attention       4 * 3072 * 3072     =    37,748,736    (in the files 9216 * 3072 and 3072 * 3072)
    #   feed-forward    3 * 3072 * 8192     =    75,497,472    (in the files 16384 * 3072 and 3072 * 8192)
    #   two norms       2 * 3072            =         6,144
    #   one layer                               113,252,352    * 32 = 3,624,075,264
    #   embeddings      32064 * 3072        =    98,500,608    *  2 =   197,001,216
    #   last norm       3072                =         3,072    *  1 =         3,072
    #                                                                 3,821,079,552
    # States: 16 bytes a parameter, 61.1 GB.

    batch_tokens=1024 * 4096,
    micro_batch_size=2,
    max_steps=786782,               # 3.3 * 10^12 tokens / 4,194,304, rounded up
    learning_rate=3e-4,
    warmup_steps=2000,
    final_lr=0.1,
    weight_decay=0.1,
    grad_clip=1.0,

    log_every=10,
    eval_every=1000,
    save_light=1000,
    save_full=1000,
)
