"""
Who is still there, and who wants us to leave.

Signals: SIGTERM and SIGUSR1, with which schedulers announce the end, are only noted (also while the main thread waits
in a collective, where Python's handlers do not run: the number then comes through a pipe). The loop asks at the end of
a step, all ranks together, saves and leaves with exit status 75: "try again" (EX_TEMPFAIL of sysexits.h). When the
ranks do not come to the end of a step together in time, one may be dead, and a save would wait for it: all end with
status 1 and nothing is saved.

Signs of life: when a process dies, the others wait for it in a collective. gloo then names a port, NCCL nobody, and
that after its own, long timeout. So each rank counts up a number in the store that torchrun keeps, once in a beat, and
looks at its right neighbour's. Whose number stands still is named, and everybody leaves. A thread does it, which a rank
that waits in a collective still has. What is counted are one's own beats and not seconds: when a whole machine is
suspended, nobody has died.

A rank that lives and does not come: the sign also says where each rank is. When one has been at the same place for
too long, whoever is behind the others is named.
"""
import contextlib
import json
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
GONE = "the store of the processes is gone, so torchrun or the first machine is"
SHORT = 6               # so many beats suffice when it is known that something happened


class Alive:
    """`with Alive(setup, timeout) as alive:` around all that a rank does. timeout: seconds without a sign of life;
    hang: seconds at one place; leave: seconds from a signal to the end of a step."""

    def __init__(self, setup, timeout=60.0, hang=600.0, leave=30.0):
        self.setup, self.timeout, self.hang, self.leave = setup, timeout, hang, leave
        self.asked = 0                  # the signal that was received
        self.agreed = False             # all ranks have, to leave
        self.where = lambda: (0, 0, "")         # step, number and name of its phase; '': may take as long as it likes
        self.over = threading.Event()

    def __enter__(self):
        self.handlers = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGUSR1)}
        if self.setup.world > 1:
            self.me = f"process {os.getpid()} on {socket.gethostname()}"
            # A connection of its own: the process group's is held while anybody waits for a key.
            self.store = parallel.open_store("alive", self.setup.start)
            self.pipe = os.pipe()
            os.set_blocking(self.pipe[0], False)
            os.set_blocking(self.pipe[1], False)
            signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
            self._sign(0)
            dist.barrier()              # everybody's first sign is there
            self.thread = threading.Thread(target=self._beats, daemon=True)
            self.thread.start()
        return self

    def _note(self, number, frame):
        self.asked = number

    def leaving(self):
        """Whether any rank was asked to leave, on all of them; all must call it."""
        asked = torch.tensor(self.asked, device=self.setup.device)
        self.agreed = parallel.all_sum(asked, self.setup).item() > 0
        return self.agreed

    def _hear(self):
        """Notes the signals that came while the main thread was in C++."""
        with contextlib.suppress(BlockingIOError):
            numbers = [number for number in os.read(self.pipe[0], 1000) if number in self.handlers]
            self.asked = numbers[-1] if numbers else self.asked

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
            os._exit(1)             # a thread that saves may still wait for the lost one
        # Not before: torchrun sends SIGTERM as soon as one rank has died, and the reason is to be said yet.
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.setup.world > 1:
            signal.set_wakeup_fd(-1)

    def _sign(self, count):
        self.store.set(str(self.setup.rank), json.dumps([count, self.me, *self.where()]))

    def _beats(self):
        right, seen, same, count = (self.setup.rank + 1) % self.setup.world, None, 0, 0
        here, stuck, since = None, 0, 0
        while not self.over.wait(BEAT):
            count += 1
            self._hear()
            try:
                self._sign(count)
                found = json.loads(self.store.get(str(right)))[0]
                same = same + 1 if found == seen and found != "done" else 0
                seen = found
                # Once we are asked to leave (torchrun does that when a rank has died) there is little time to say why.
                if self.store.check(["lost"]) or same * BEAT >= self.timeout or self.asked and same >= 3 * SHORT:
                    self._tell(self._still(SHORT))
                    os._exit(1)
                stuck, here = stuck + 1 if here == self.where() and here[2] else 0, self.where()
                if stuck * BEAT >= self.hang:
                    self._tell(self._behind())
                    # NCCL's flight recorder waits a little longer, and then writes its own account.
                    time.sleep(30 if self.setup.device.type == "cuda" else 0)
                    os._exit(1)
                since += bool(self.asked) and not self.agreed
                if since * BEAT >= self.leave and not self.agreed:
                    self._tell([f"signal {self.asked} asked to leave, and within {self.leave:g} seconds the ranks did "
                                "not come to the end of a step together: nothing is saved"])
                    os._exit(1)
            except RuntimeError:
                if not self.over.is_set():
                    self._print(GONE)
                    os._exit(1)

    def _signs(self):
        return [json.loads(self.store.get(str(rank))) for rank in range(self.setup.world)]

    def _behind(self):
        """A sentence about the ranks that have not come as far as the others."""
        signs = self._signs()
        first = max(sign[2:4] for sign in signs)
        told = lambda sign: f"step {sign[2]}, {sign[4] or 'log, evaluate, save'}"
        late = [f"rank {rank} ({sign[1]}) lives and does not come: it is in {told(sign)}" for rank, sign in enumerate(signs)
                if sign[2:4] < first]
        ahead = told(next(sign for sign in signs if sign[2:4] == first))
        late.append(f"the others have waited in {ahead} for {self.hang:g} seconds" if late else
                    f"all ranks have been in {ahead} for {self.hang:g} seconds: the network, or a step that takes "
                    "longer than hang_timeout")
        return late

    def _still(self, beats):
        """Sentences about the other ranks that give no sign of life for so many beats."""
        try:
            before = self._signs()
            for _ in range(beats):      # and not one long sleep, since a machine may be suspended in it
                time.sleep(BEAT)
            after = self._signs()
        except RuntimeError:
            return [GONE]
        lost = []
        for rank, ((old, *_), (count, who, *_)) in enumerate(zip(before, after)):
            if count == old and rank != self.setup.rank and count != "done":
                lost.append(f"rank {rank} ({who}) " + ("has ended; what it said is above" if count == "ended" else
                                                       "gives no sign of life: it died or hangs"))
        return lost

    def _tell(self, lost):
        """One rank says it; the others, whose neighbours may be well, learn that it is time to leave."""
        try:
            if lost and self.store.add("said", 1) == 1:
                self._print("; ".join(lost))
                self.store.set("lost", "yes")
        except RuntimeError:
            self._print(GONE)

    def _print(self, reason):
        print(f"[rank {self.setup.rank}] {reason}. So this run ends here; the same command continues from its newest "
              "checkpoint.", file=sys.stderr, flush=True)
