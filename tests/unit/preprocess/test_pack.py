from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steadytrain.components.preprocess.shards import OPEN_SEQUENCES, best_fit


@given(st.lists(st.integers(2, 50), max_size=600), st.integers(50, 80))
def test_every_window_is_packed_once_and_none_overflows(sizes: list[int], capacity: int) -> None:
    windows = [[number] * size for number, size in enumerate(sizes)]
    sequences = list(best_fit(windows, capacity))
    assert sorted(window[0] for one in sequences for window in one) == list(range(len(sizes)))
    assert all(sum(map(len, one)) <= capacity for one in sequences)


def test_windows_go_to_the_fullest_row_that_fits() -> None:
    windows = [[0] * size for size in (60, 80, 15, 35)]
    packed = [[len(window) for window in one] for one in best_fit(windows, 100)]
    assert sorted(packed) == [[60, 35], [80, 15]]


def test_number_of_open_rows_is_bounded() -> None:
    taken = 0

    def windows() -> object:
        nonlocal taken
        for _ in range(10 * OPEN_SEQUENCES):
            taken += 1
            yield [0] * 60

    next(best_fit(windows(), 100))  # type: ignore[arg-type, type-var]
    assert taken == OPEN_SEQUENCES + 1
