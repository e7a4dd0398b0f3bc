"""The plan of a run, mixtures, the reading ahead, and the proof of an order."""
import heapq
import itertools

import numpy as np
import pytest

from engine.loader import interleave, plan_step

# --- the plan --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("skipped", [[], [(0, 3)], [(5, 8)], [(5, 8), (8, 9)], [(8, 9), (5, 8)], [(5, 8), (6, 10)],
                                     [(3, 9), (4, 5), (11, 12)], [(2, 2), (7, 7)], [[4, 6], [20, 21]]])
def test_the_plan_without_the_windows_skipped(skipped):
    left = [step for step in range(40) if not any(first <= step < end for first, end in skipped)]
    assert [plan_step(done, skipped) for done in range(20)] == left[:20]


def test_a_window_added_at_a_roll_back_leaves_what_was_done_as_it_was():
    windows = []
    for at, size in ((10, 3), (10, 2), (14, 1), (30, 5)):          # twice from the same step
        before = [plan_step(done, windows) for done in range(at)]
        first = plan_step(at, windows) + 1
        windows.append((first, first + size))
        assert [plan_step(done, windows) for done in range(at)] == before
        assert plan_step(at + 1, windows) == first + size or plan_step(at + 1, windows) > first


SHARES = [[1.0], [0.5, 0.5], [0.7, 0.3], [0.999, 0.001], [1 / 3, 1 / 3, 1 / 3], [0.6, 0.3, 0.1], [0.01, 0.29, 0.5, 0.2],
          [1 / 7] * 7, [0.9, *[0.1 / 9] * 9]]


@pytest.mark.parametrize("shares", SHARES)
def test_places_go_to_sources_by_what_is_due_first(shares):
    """Against a merge of the sources' due times that begins at the first place; any window alone."""
    due = lambda s: (((j + 0.5) / shares[s], s, j) for j in itertools.count())
    merged = list(itertools.islice(heapq.merge(*map(due, range(len(shares)))), 3000))
    source, number = interleave(0, 3000, shares)
    assert source.tolist() == [s for _, s, _ in merged] and number.tolist() == [j for _, _, j in merged]
    for first, count in ((1, 1), (17, 5), (1000, 64), (2990, 10)):
        alone = interleave(first, count, shares)
        assert np.array_equal(alone, (source[first:first + count], number[first:first + count]))


@pytest.mark.parametrize("shares", SHARES)
def test_counts_never_leave_the_shares_by_more_than_is_stated(shares):
    bound = [(1 + (len(shares) - 2) * share) / 2 for share in shares]
    for first in (0, 10 ** 6 + 7, 10 ** 12 + 39):
        source, number = interleave(first, 5000, shares)
        for s, share in enumerate(shares):
            had = number[source == s]
            assert np.array_equal(had, had[:1] + np.arange(len(had)) if len(had) else had)       # none left out
            places = first + np.flatnonzero(source == s)
            assert (np.abs(had - places * share) <= bound[s] + 1e-3).all()
            assert (np.abs(had + 1 - (places + 1) * share) <= bound[s] + 1e-3).all()
