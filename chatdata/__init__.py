"""The demonstration's instruction data: pages.py reads the documentation, kinds.py asks, remark.py judges."""
