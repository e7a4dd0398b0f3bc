"""
A Llama of GPT-2's size (12 layers of 768, context 1,024): what one GPU trains in a day, and what most comparisons use.

    python prepare_data.py config/llama_124m.py --inputs='CRAWL/*.warc.gz'      documents
    python train_tokenizer.py config/llama_124m.py                              a vocabulary of 50,304
    python prepare_data.py config/llama_124m.py --inputs='CRAWL/*.warc.gz'      token shards
    torchrun --nproc_per_node=8 train.py config/llama_124m.py
"""
data_dir = "data/llama_124m"
out_dir = "out/llama_124m"

# GPT-2 has 50,257 tokens: 256 bytes, 50,000 merges and one special. 50,304 = 393 * 128 is the next multiple of 128, and
# since this tokenizer is trained here, all of them are tokens that occur and none is padding.
train_tokenizer = dict(vocab_size=50304)

train = dict(
    # GPT-2's feed-forward has two matrices of width 4 * 768 = 3,072. Three with the same number of weights are 2/3 as
    # wide: 8/3 * 768 = 2,048, a power of 2 without rounding. Its positions are a table of 1,024 * 768; RoPE has none.
    n_layer=12,
    n_head=12,                      # of 64 dimensions each
    n_kv_head=12,
    n_embd=768,
    n_inner=2048,
    vocab_size=50304,
    block_size=1024,
    rope_theta=10000.0,
    norm_eps=1e-5,
    tie_embeddings=True,            # as in GPT-2: at this size a second matrix would be a quarter of all

    # Parameters:
    #   attention       4 * 768 * 768       =   2,359,296
    #   feed-forward    3 * 768 * 2048      =   4,718,592
    #   two norms       2 * 768             =       1,536
    #   one layer                               7,079,424    * 12 = 84,953,088
    #   embeddings      50304 * 768         =  38,633,472    *  1 = 38,633,472    (tied)
    #   last norm       768                 =         768    *  1 =        768
    #                                                              123,587,328
    # GPT-2 has 124,439,808: 786,432 of positions and 102,144 of biases and norms' offsets more, 47 rows of 768 less.
    #
    # States: 16 bytes a parameter (fp32 weights, gradients, AdamW's two moments), 1.98 GB.

    # Optimisation: half a million tokens a step, as GPT-2's reproductions have it; 10 * 10^9 tokens.
    batch_tokens=512 * 1024,
    micro_batch_size=32,
    max_steps=19073,                # 10^10 / 524,288, rounded down
    learning_rate=6e-4,
    warmup_steps=700,
    final_lr=0.1,
    weight_decay=0.1,
    grad_clip=1.0,

    log_every=10,
    eval_every=500,
    save_light=2000,
    save_full=1000,
)
