"""Cleans many input files in processes, and survives what pages do to those; and the processes on several machines.

A page can kill the process that works on it (a fault in a library, all memory used) or hold it for ever. Its number is
in memory that this process shares, so it is known which one it was. The file is begun anew, since something from
outside may have been the reason; a page that does it twice is quarantined: left out, counted, named. So the result does
not depend on how many processes there are, nor on one that is killed from outside.
"""

import collections
import multiprocessing
import os
import signal
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

from configurator import refuse
from prepare.clean import DOCUMENTS, KEPT, PAGE, READ, SINCE, SLOTS, clean_file
from prepare.progress import Progress
from prepare.warc import shown_name

DEATHS = 2              # of one page's processes, until the page is quarantined
PATIENCE = 300          # seconds that a page may take


class Worker:
    """A process, the pipe to it, the numbers that it shares, and what it works on."""

    def __init__(self, context):
        self.pipe, theirs = context.Pipe()
        self.slot = context.RawArray("q", SLOTS)
        # Spawned, not forked: what other threads hold at that moment would be held for ever in a fork.
        self.process = context.Process(target=work, args=(theirs, self.slot, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()
        self.task = None


def work(pipe, slot, parent):
    """A worker's life: a task after the other, until there are no more or nobody who would give them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)      # of Ctrl-C the parent hears too, and ends us

    def beat():
        if os.getppid() != parent:                    # killed: the next run may already be writing
            os._exit(1)

    try:
        while task := pipe.recv():
            try:
                clean_file(*task, slot, beat)
                pipe.send(None)
            except (Exception, SystemExit) as error:
                if not isinstance(error, (OSError, SystemExit)):
                    error.add_note("".join(traceback.format_exception(error)))
                pipe.send(error)
    except (EOFError, OSError):
        pass


def clean_files(tasks, settings, workers):
    """Clean the files of tasks [(path, target)] with so many processes; 0: in this one, which then dies with a page.

    Raises what was raised in a worker."""
    total = sum(os.path.getsize(path) for path, _ in tasks)
    progress = Progress("cleaning", total)
    done = collections.Counter()                       # documents, kept, bytes of the files that are finished

    def show(slots):
        sums = [done[name] + sum(slot[name] for slot in slots) for name in (DOCUMENTS, KEPT, READ)]
        progress(*sums)

    def finished(path, slot):
        done.update({DOCUMENTS: slot[DOCUMENTS], KEPT: slot[KEPT], READ: os.path.getsize(path)})

    try:
        if workers:
            _in_processes(tasks, settings, workers, show, finished)
        for path, target in () if workers else tasks:
            slot = [0] * SLOTS
            clean_file(path, target, settings, (), slot, lambda: show([slot]))
            finished(path, slot)
    finally:
        progress.close()


def _in_processes(tasks, settings, workers, show, finished):
    context = multiprocessing.get_context("spawn")
    waiting, everyone = collections.deque(tasks), []
    deaths, skip = collections.Counter(), collections.defaultdict(set)
    try:
        while waiting or any(worker.task for worker in everyone):
            while waiting and len(everyone) < workers:
                everyone.append(Worker(context))
            for worker in everyone:
                if waiting and not worker.task:
                    worker.task = path, target = waiting.popleft()
                    worker.slot[:] = [-1] * 2 + [0] * (SLOTS - 2)
                    try:
                        worker.pipe.send((path, target, settings, skip[target]))
                    except OSError:
                        pass                                       # dead already: seen below
            wait([part for worker in everyone for part in (worker.pipe, worker.process.sentinel)], timeout=1)
            for worker in list(everyone):
                slow = worker.task and worker.slot[SINCE] > 0 and time.monotonic() - worker.slot[SINCE] > PATIENCE
                if slow:
                    worker.process.kill()
                    worker.process.join()
                try:
                    answer = worker.pipe.recv() if worker.pipe.poll() else worker
                except (EOFError, OSError):
                    worker.process.join()
                    answer = worker
                if answer is None:
                    finished(worker.task[0], worker.slot)
                    worker.task = None
                    worker.slot[:] = [0] * SLOTS
                elif answer is not worker:
                    raise answer
                elif not worker.process.is_alive():
                    everyone.remove(worker)
                    if worker.task:
                        _died(worker, "took too long" if slow else "died", deaths, skip)
                        waiting.appendleft(worker.task)
            show([worker.slot for worker in everyone])
    finally:
        for worker in everyone:
            worker.process.kill()
            worker.process.join()


def _died(worker, what, deaths, skip):
    """Remember which page it was at; a page that was it before is left out from now on."""
    path, target = worker.task
    page = worker.slot[PAGE]
    deaths[target, page] += 1
    last = deaths[target, page] >= DEATHS
    if last and (page < 0 or page in skip[target]):
        refuse(f"the process that reads {path} dies again and again behind page {page}. Leave the file out of "
               "--inputs, or run with --workers=0 to see why.")
    print(f"a process {what} at page {page} of {shown_name(path)}: "
          f"{'this page is left out' if last else 'its file is begun anew'}", flush=True)
    if last:
        skip[target].add(page)


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
