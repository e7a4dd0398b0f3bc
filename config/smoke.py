"""
Every stage once, as small as it can be and still be real: to see that the chain holds, not that it learns.

    bash runs/demo.sh config/smoke.py
"""
data_dir = "data/smoke"
out_dir = "out/smoke"
