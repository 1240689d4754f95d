"""Batches are split where memory runs out: in order, down to one row, and the same way again."""

from __future__ import annotations

import pytest
import torch

from steadytrain.components.shared.foreign import OutOfMemory, ran_out
from steadytrain.components.tasks.fitting import batched, splitting


class Device:
    """Doubles numbers, as long as the sum of their lengths fits. Allocating the rest raises."""

    def __init__(self, size):
        self.size, self.tried, self.told = size, [], []

    def __call__(self, rows):
        self.tried.append(len(rows))
        if len(rows) * max(rows) > self.size:
            torch.empty(1 << 62, dtype=torch.uint8)
        return [2 * row for row in rows]

    def run(self, rows, size=8):
        with splitting("doubling", lambda *said: self.told.append(said)):
            return batched(self, rows, size, int)


@pytest.mark.slow
def test_rows_stay_in_order_and_whole_batches_that_fit_stay_whole():
    device, rows = Device(size=40), [9, 9, 9, 9, 9, 5, 5, 5, 5, 5, 5, 5, 5, 1, 1, 1]
    assert device.run(rows) == [2 * row for row in rows]
    # A batch is tried again only if it is smaller than one that failed.
    assert device.tried == [8, 4, 4, 8]
    assert device.told == [("doubling", 4, 8)]
    assert Device(size=40).run([9] * 7, size=7) == [18] * 7


@pytest.mark.slow
def test_batches_as_large_as_one_that_failed_are_not_tried():
    device = Device(size=20)
    assert device.run([4] * 24) == [8] * 24
    assert device.tried == [8, 4, 4, 4, 4, 4, 4]
    assert device.told == [("doubling", 4, 8)]


@pytest.mark.slow
def test_one_row_that_does_not_fit_is_an_error_with_the_reason():
    device = Device(size=5)
    with pytest.raises(OutOfMemory, match=r"doubling: one row of 9 tokens does not fit") as failed:
        device.run([9, 3])
    assert "DefaultCPUAllocator" in failed.value.message
    assert device.tried == [2, 1]


def test_other_errors_pass():
    def broken(rows):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        batched(broken, [1, 2], 2, int)


@pytest.mark.slow
def test_an_inner_context_tells_the_outer_one_and_remembers_on_its_own():
    device, told = Device(size=8), []
    with splitting("outer", lambda *said: told.append(said)):
        for name in ("first", "second"):
            with splitting(name):
                batched(device, [4] * 4, 4, int)
    assert told == [("first", 2, 4), ("second", 2, 4)]
    assert device.tried == [4, 2, 2] * 2


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (MemoryError(), True),
        (RuntimeError("shapes differ"), False),
        (KeyboardInterrupt("CUDA out of memory"), False),
    ],
)
def test_errors_that_say_that_memory_ran_out(error, memory):
    assert ran_out(error) is memory
