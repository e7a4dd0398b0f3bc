"""Several machines: the processes that torchrun has started, and the one thing they do together, which is to wait."""

import os
from datetime import timedelta


class Ranks:
    """This process's number, how many there are, and gather(value), which gives every process everyone's value; nobody
    passes it before all have come. One process alone needs no torch for it."""

    def __init__(self):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.size > 1:
            import torch.distributed
            self.torch = torch.distributed
            # Days, since some have more to clean than others. If one fails, torchrun ends them all.
            self.torch.init_process_group("gloo", timeout=timedelta(days=30))

    def gather(self, value=None):
        if self.size == 1:
            return [value]
        values = [None] * self.size
        self.torch.all_gather_object(values, value)
        return values

    def say(self, *lines):
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)
