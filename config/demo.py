"""
The whole chain on a laptop with two cores: about ten minutes, no network, no GPU.

    bash runs/demo.sh

Keys at the top are for every script that has them; a dict named like a script is for that script alone.
"""
data_dir = "data/demo"
out_dir = "out/demo"

# The documents are Python's own documentation. It is no prose: Gopher's rules (--rules=gopher_quality,gopher_repetition)
# would drop 261 of the 542 pages, mostly for lines that recur, as "Methods inherited from" must. The guards alone decide.
# Inherited methods are documented on every page of a class that has them, so paragraphs are kept once: without that, half
# of the text would be repetition, and more than half of a held-out page would stand in the training text word for word.
prepare_data = dict(corpus="pydoc", paragraph_min_chars=40)

# 4.2 million parameters: what two cores can train in about five minutes, on 1.2 epochs of the text. Every token counts in so
# short a run, so the matrices are trained by Muon, and the steps are small.
train = dict(n_layer=4, n_head=4, n_kv_head=4, n_embd=256, n_inner=704, block_size=256, batch_tokens=4096, max_steps=540,
             learning_rate=4e-3, matrix_learning_rate=0.02, eval_every=135, save_light=270, save_full=135)

# Conversations are short, and for short rows the explicit attention is the faster one on a CPU.
sft = dict(batch_size=32, micro_batch_size=32, learning_rate=2e-3, max_steps=480, attention="fp32", eval_every=120,
           save_full=120)

reward = dict(learning_rate=1e-3, epochs=2, attention="fp32")
rlhf = dict(attention="fp32")
