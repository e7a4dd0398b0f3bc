"""One function on many batches, by several processes: the results come in the batches' order, and are the same for any
number of processes."""
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice

from configurator import refuse

_function = None            # of a worker: sent once, not with every batch


def in_parallel(function, batches, workers):
    """Yields function(batch) for each batch. No more than 2 * workers batches wait in memory; a single one is worked on
    in this process. Refuses when the system kills a worker."""
    batches, running = iter(batches), deque()
    first = list(islice(batches, 2)) if workers > 1 else []
    if len(first) < 2:
        yield from map(function, chain(first, batches))
        return
    try:
        with ProcessPoolExecutor(workers, initializer=_take, initargs=(function,)) as pool:
            for batch in chain(first, batches):
                running.append(pool.submit(_work, batch))
                if len(running) > 2 * workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
    except BrokenProcessPool:
        refuse("one of the worker processes was killed, perhaps for want of memory. Try again, with --workers=1.")


def text_batches(texts, size=1 << 21):
    """Lists of texts with about `size` characters together."""
    batch, room = [], size
    for text in texts:
        batch.append(text)
        room -= len(text)
        if room <= 0:
            yield batch
            batch, room = [], size
    if batch:
        yield batch


def _take(function):
    global _function
    _function = function


def _work(batch):
    return _function(batch)
