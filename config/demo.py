"""
The whole chain on a laptop with two cores: about ten minutes, no network, no GPU.

    bash runs/demo.sh

Keys at the top are for every script that has them; a dict named like a script is for that script alone.
"""
data_dir = "data/demo"
out_dir = "out/demo"

# The documents are Python's own documentation. It is no prose: Gopher's rules would keep about one page in 600, so the
# guards alone decide here.
prepare_data = dict(corpus="pydoc")
