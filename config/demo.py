"""
The whole chain on a laptop with two cores: about ten minutes, no network, no GPU.

    bash runs/demo.sh

Keys at the top are for every script that has them; a dict named like a script is for that script alone.
"""
data_dir = "data/demo"
out_dir = "out/demo"

# The documents are Python's own documentation. It is no prose: Gopher's rules (--rules=gopher_quality,gopher_repetition)
# would drop 261 of the 542 pages, mostly for lines that recur, as "Methods inherited from" must. The guards alone decide.
prepare_data = dict(corpus="pydoc")

# 5.9 million parameters: what two cores can train in about five minutes, on 1.2 epochs of the text. Every token counts in so
# short a run, so the matrices are trained by Muon, and the step is small.
train = dict(n_layer=6, n_head=4, n_kv_head=4, n_embd=256, n_inner=704, block_size=256, batch_tokens=8192, max_steps=260,
             learning_rate=4e-3, matrix_learning_rate=0.02, eval_every=65, save_light=130, save_full=65)
