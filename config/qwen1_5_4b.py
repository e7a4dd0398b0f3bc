"""
Qwen1.5 4B: a Llama with biases on q, k and v, and a vocabulary of 151,936.

    torchrun --nproc_per_node=8 train.py config/qwen1_5_4b.py
    torchrun --nproc_per_node=8 train.py config/qwen1_5_4b.py --init_from=DIR        from its Hugging Face folder

Checkpoints are written as model_type "qwen2", the only form in Hugging Face's files that has those biases.
"""
data_dir = "data/qwen1_5_4b"
out_dir = "out/qwen1_5_4b"

train_tokenizer = dict(vocab_size=151646)

train = dict(
    # 8/3 * 2560 = 6,826.7; the next multiple of 256 is 27 * 256 = 6,912.
    n_layer=40,
    n_head=20,                      # of 128 dimensions each
    n_kv_head=20,
    n_embd=2560,
    n_inner=6912,
    qkv_bias=True,                  # Su's observation that a bias on q and k helps to read beyond the trained context
    vocab_size=151936,              # the tokenizer's 151,646, filled up to a multiple of 128: 1187 * 128
    block_size=32768,
    rope_theta=5000000.0,
    norm_eps=1e-6,
    tie_embeddings=False,

    # Parameters:
    #   attention       4 * 2560 * 2560     =    26,214,400
    #   its biases      3 * 2560            =         7,680
    #   feed-forward    3 * 2560 * 6912     =    53,084,160
    #   two norms       2 * 2560            =         5,120
    #   one layer                                79,311,360    * 40 = 3,172,454,400
    #   embeddings      151936 * 2560       =   388,956,160    *  2 =   777,912,320    (a fifth of all)
    #   last norm       2560                =         2,560    *  1 =         2,560
    #                                                                 3,950,369,280
    # States: 16 bytes a parameter, 63.2 GB: on one GPU of 80 GB with short blocks only.

    batch_tokens=128 * 32768,
    micro_batch_size=1,
    max_steps=500000,
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
