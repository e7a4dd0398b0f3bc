"""
Who is still there, and who wants us to leave.

Signals: SIGTERM and SIGUSR1, with which schedulers announce the end, are only noted. The loop asks at the end of a
step, all ranks together, saves and leaves with exit status 75: "try again" (EX_TEMPFAIL of sysexits.h).

Signs of life: when a process dies, the others wait for it in a collective. gloo then names a port, NCCL nobody, and
that after its own, long timeout. So each rank counts up a number in the store that torchrun keeps, once in a beat, and
looks at its right neighbour's. Whose number stands still is named, and everybody leaves. A thread does it, which a rank
that waits in a collective still has. What is counted are one's own beats and not seconds: when a whole machine is
suspended, nobody has died.
"""
import contextlib
import os
import signal
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from engine import parallel

TRY_AGAIN = 75          # exit status: nothing is wrong that a user could mend; the same command continues
BEAT = 0.5              # seconds
SHORT = 6               # so many beats suffice when it is known that something happened


class Alive:
    """`with Alive(setup, timeout) as alive:` around all that a rank does. timeout: seconds without a sign of life."""

    def __init__(self, setup, timeout=60.0):
        self.setup, self.timeout = setup, timeout
        self.asked = 0                  # the signal that was received
        self.over = threading.Event()

    def __enter__(self):
        self.handlers = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGUSR1)}
        if self.setup.world > 1:
            self.me = f"process {os.getpid()} on {socket.gethostname()}"
            # A connection of its own: the process group's is held while anybody waits for a key.
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self.store = dist.PrefixStore("alive", dist.TCPStore(address, port, is_master=False))
            self._sign(0)
            dist.barrier()              # everybody's first sign is there
            self.thread = threading.Thread(target=self._beats, daemon=True)
            self.thread.start()
        return self

    def _note(self, number, frame):
        self.asked = number

    def leaving(self):
        """Whether any rank was asked to leave, on all of them; all must call it."""
        return parallel.all_sum(torch.tensor(self.asked, device=self.setup.device), self.setup).item() > 0

    def __exit__(self, kind, error, trace):
        lost = []
        if self.setup.world > 1:
            # A refusal may come of an error in a collective, too: it is then the context of the refusal.
            errors = (error, error and error.__context__)
            broken = any(isinstance(each, (RuntimeError, CheckpointException)) for each in errors)
            try:
                lost = self._still(SHORT) if broken else []
            except RuntimeError:
                self.thread.join(20)    # it finds the store gone as well, says so and leaves
            self.over.set()
            self.thread.join(20)        # a thread that is in torch's C++ when Python ends may keep it from ending
            with contextlib.suppress(RuntimeError):         # the store itself may be gone
                self._sign("ended" if error and getattr(error, "code", 1) != TRY_AGAIN else "done")
                self._tell(lost)
        if lost:
            os._exit(TRY_AGAIN)     # a thread that saves may still wait for the lost one
        # Not before: torchrun sends SIGTERM as soon as one rank has died, and the reason is to be said yet.
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _sign(self, count):
        self.store.set(str(self.setup.rank), f"{count}, {self.me}")

    def _beats(self):
        right, seen, same, count = (self.setup.rank + 1) % self.setup.world, None, 0, 0
        while not self.over.wait(BEAT):
            count += 1
            try:
                self._sign(count)
                found = self.store.get(str(right))
                same = same + 1 if found == seen and not found.startswith(b"done") else 0
                seen = found
                # Once we are asked to leave (torchrun does that when a rank has died) there is little time to say why.
                if self.store.check(["lost"]) or same * BEAT >= self.timeout or self.asked and same >= 3 * SHORT:
                    self._tell(self._still(SHORT))
                    os._exit(TRY_AGAIN)
            except RuntimeError:
                if not self.over.is_set():
                    self._print("the store of the processes is gone, so torchrun or the first machine is")
                    os._exit(TRY_AGAIN)

    def _still(self, beats):
        """Sentences about the other ranks that give no sign of life for so many beats."""
        signs = lambda: [self.store.get(str(rank)).decode() for rank in range(self.setup.world)]
        before, lost = signs(), []
        for _ in range(beats):          # and not one long sleep, since a machine may be suspended in it
            time.sleep(BEAT)
        for rank, (old, new) in enumerate(zip(before, signs())):
            count, who = new.split(", ", 1)
            if new == old and rank != self.setup.rank and count != "done":
                lost.append(f"rank {rank} ({who}) " + ("has ended; what it said is above" if count == "ended" else
                                                       "gives no sign of life: it died or hangs"))
        return lost

    def _tell(self, lost):
        """One rank says it; the others, whose neighbours may be well, learn that it is time to leave."""
        if lost and self.store.add("said", 1) == 1:
            self._print("; ".join(lost))
            self.store.set("lost", "yes")

    def _print(self, reason):
        print(f"[rank {self.setup.rank}] {reason}. So this run ends here; the same command continues from its newest "
              "checkpoint.", file=sys.stderr, flush=True)
