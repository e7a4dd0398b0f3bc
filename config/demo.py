"""
The whole chain on a laptop with two cores, no network, no GPU: about a quarter of an hour where the CPU multiplies bf16
(AMX, AVX512-BF16), 25 minutes where it does not.

    bash runs/demo.sh

Keys at the top are for every script that has them; a dict named like a script is for that script alone.
"""
data_dir = "data/demo"
out_dir = "out/demo"

# The documents are Python's own documentation. It is no prose: Gopher's rules (gopher_quality, gopher_repetition) would
# drop nearly half of the pages, mostly for lines that recur, as "Methods inherited from" must. The guards alone decide.
# Inherited methods are documented on every page of a class that has them, so paragraphs are kept once: without that,
# half of the text would be repetition, and more than half of a held-out page would stand in the training text.
prepare_data = dict(corpus="pydoc", paragraph_min_chars=40)

# A small vocabulary: each piece is then seen often enough to be learned, and the scores cost less.
train_tokenizer = dict(vocab_size=2048)

# 3.7 million parameters: what two cores can train in three to four minutes, on one and a half epochs of the text.
# Every token counts in so short a run, so the matrices are trained by Muon.
train = dict(n_layer=4, n_head=4, n_kv_head=4, n_embd=256, n_inner=704, block_size=256, batch_tokens=8192,
             micro_batch_size=32, max_steps=160, learning_rate=4e-3, matrix_learning_rate=0.02, eval_every=40,
             save_light=80, save_full=40)

# Enough questions that none comes twice: what comes twice is learned by heart. Conversations are short, and for short
# rows the explicit attention is the faster one on a CPU. The learning rate ends at 0: the form of answers whose content
# is guessed swings from step to step.
prepare_chat = dict(questions=80000, preferences=4800)
sft = dict(batch_size=32, micro_batch_size=32, learning_rate=2e-3, schedule="linear", final_lr=0.0, max_steps=720,
           attention="fp32", compile=True, eval_every=360, save_full=180)

# Small steps, since nobody tells the model the adjectives' tone and the adverbs' strength: it finds them in rankings of
# eight answers each.
reward = dict(batch_size=4, learning_rate=1.2e-3, along_until=0.7, attention="fp32", compile=True, save_full=150)
rlhf = dict(updates=16, attention="fp32")
# Not in the demo's own call, see bench/alignment.py: a third of the rankings.
dpo = dict(max_rankings=1600, learning_rate=2e-4, attention="fp32")
