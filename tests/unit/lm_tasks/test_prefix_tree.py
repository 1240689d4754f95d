"""Prefix trees: every sequence is complete and attends only to itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.tasks.prefix_attention import calls, tree_rows

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)


def above(row, place):
    """Return the positions of the tokens above one in the tree, including its own."""
    return [other for other in range(place + 1) if place < row.ends[other]]


@given(SEQUENCES, st.integers(1, 40))
def test_each_sequence_is_the_path_to_its_last_token(sequences, size):
    seen = []
    for row in tree_rows(sequences, size):
        for member, places in zip(row.members, row.places, strict=True):
            assert row.tokens[places].tolist() == sequences[member]
            assert above(row, places[-1]) == places.tolist()
            assert row.depths[places].tolist() == list(range(len(places)))
        seen += row.members
    assert sorted(seen) == list(range(len(sequences)))


@given(SEQUENCES)
def test_no_prefix_is_stored_twice(sequences):
    (row,) = tree_rows(sequences, 10**6)
    beginnings = {tuple(item[:end]) for item in sequences for end in range(1, len(item) + 1)}
    assert len(row.tokens) == len(beginnings)


@given(SEQUENCES, st.integers(1, 40))
def test_calls_cover_each_token_once_with_its_prefix(sequences, apart):
    for row in tree_rows(sequences, 40):
        found = calls(row.ends, apart)
        own = [place for call in found for place in range(call.start, call.stop)]
        assert own == list(range(len(row.tokens)))
        for call in found:
            before = {place for span in call.before for place in range(*span)}
            for place in range(call.start, call.stop):
                given_to_it = before | set(range(call.start, place + 1))
                assert set(above(row, place)) <= given_to_it
                # Everything before the call is above all of its tokens and needs no mask.
                assert before <= set(above(row, place))


@pytest.mark.parametrize("size", [20, 50])
def test_rows_stay_near_their_size_and_group_shared_prefixes(size):
    generator = np.random.default_rng(0)
    sequences = []
    for question in range(30):
        context = [question, *generator.integers(0, 100, 9).tolist()]
        sequences += [[*context, choice] for choice in range(4)]
    rows = list(tree_rows(sequences, size))
    assert max(len(row.tokens) for row in rows) <= size
    assert sum(len(row.tokens) for row in rows) == 30 * 14
