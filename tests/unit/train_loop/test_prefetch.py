"""The thread that prepares the next global batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.events.types import TrainingStep
from steadytrain.components.tasks.base import Batch, Row
from steadytrain.components.tasks.causal_lm import SupervisedFineTuning
from steadytrain.components.techniques.modules import to_device
from steadytrain.components.techniques.order import RowOrder
from steadytrain.components.train.loop.batches import Prefetch, take_share

from support.training import events_of, result_of

STEPS, BATCH, ROWS = 5, 4, 12


class _Task:
    """A task whose rows and batches are numbers. It raises an error at the row `fails`."""

    padded = ""

    def __init__(self, fails: int = -1) -> None:
        self.fails, self.collated = fails, list[int]()
        self.gate = threading.Semaphore(1000)

    def collate(self, rows: Sequence[Any]) -> Batch:
        self.gate.acquire()
        if self.fails in rows:
            raise LookupError(f"row {self.fails}")
        self.collated.extend(rows)
        return {"rows": torch.tensor(rows), "lengths": list(rows)}

    def weight(self, batch: Batch) -> int:
        return len(batch["rows"])

    def cost(self, row: Any) -> int:
        return 10


def _parts(task: _Task, ahead: int = 1, **training: Any) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(
            training=TrainingConfig(global_batch_size=BATCH, prefetch_batches=ahead, **training)
        ),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        task=task,
        order=RowOrder(ROWS, seed=3),
        train=range(ROWS),
        rank=0,
        world_size=1,
        batch=BatchSettings(2),
        sequences=None,
        steps=STEPS,
        skipped_batches=(),
    )


def test_prefetched_batches_equal_direct_ones_from_any_step():
    plain = [take_share(_parts(_Task()), step) for step in range(STEPS)]
    for first in (0, 3):
        with closing(Prefetch(_parts(_Task()))) as data:
            for step in range(first, STEPS):
                found = data.take(step)
                assert (found.weight, found.tokens, found.places) == (4, 40, 40)
                expected = [batch["lengths"] for batch in plain[step].batches]
                assert [batch["lengths"] for batch in found.batches] == expected
                assert found.waited >= 0


def test_one_step_is_fetched_ahead_and_no_more():
    task = _Task()
    with closing(Prefetch(_parts(task))) as data:
        data.take(0)
        data._thread.submit(lambda: None).result()  # wait until the earlier request is done
        assert len(task.collated) == 2 * BATCH
        for step in range(1, STEPS):
            data.take(step)
    assert len(task.collated) == STEPS * BATCH


@pytest.mark.parametrize("ahead", [2, 3])
def test_as_many_steps_are_fetched_ahead_as_are_set(ahead):
    plain = [take_share(_parts(_Task()), step) for step in range(STEPS)]
    task = _Task()
    with closing(Prefetch(_parts(task, ahead))) as data:
        for step in range(STEPS):
            found = data.take(step)
            data._thread.submit(lambda: None).result()
            assert len(task.collated) == min(step + 1 + ahead, STEPS) * BATCH
            expected = [batch["lengths"] for batch in plain[step].batches]
            assert [batch["lengths"] for batch in found.batches] == expected


class _Drawn(_Task):
    """Rows are dictionaries. Each waits until another thread reads one, too."""

    def __init__(self, meeting: threading.Barrier | None = None) -> None:
        super().__init__()
        self.meeting = meeting

    def draw(self, row: int, position: int, *, training: bool) -> Row:
        assert training
        if self.meeting:
            self.meeting.wait()
        return {"row": row, "position": position}

    def collate(self, rows: Sequence[Any]) -> Batch:
        return {"rows": rows}


@pytest.mark.parametrize("mixup", [{}, {"alpha": 0.4}], ids=["plain", "mixup"])
def test_loader_workers_read_rows_side_by_side_and_in_order(mixup):
    before, plain = set(threading.enumerate()), _parts(_Drawn(), mixup=mixup)
    task = _Drawn(threading.Barrier(2, timeout=300))
    with closing(Prefetch(_parts(task, loader_workers=2, mixup=mixup))) as data:
        for step in range(STEPS):
            rows = [batch["rows"] for batch in data.take(step).batches]
            assert rows == [batch["rows"] for batch in take_share(plain, step).batches]
    # Threads of other tests may end meanwhile.
    assert set(threading.enumerate()) <= before


def test_smaller_micro_batches_are_fetched_again():
    parts = _parts(_Task(), 3)
    with closing(Prefetch(parts)) as data:
        data.take(0)
        parts.batch = BatchSettings(1)
        data.forget()
        assert [batch["lengths"] for batch in data.take(1).batches] == [
            [row] for row in RowOrder(ROWS, seed=3).take(BATCH, BATCH)
        ]


def test_slow_prefetch_does_not_block_the_current_batch():
    task = _Task()
    task.gate = threading.Semaphore(2)
    with closing(Prefetch(_parts(task))) as data:
        assert data.take(0).weight == BATCH
        task.gate.release(1000)
        assert data.take(1).weight == BATCH


def test_prefetch_error_is_raised_at_its_step():
    rows = RowOrder(ROWS, seed=3).take(2 * BATCH, BATCH)
    with closing(Prefetch(_parts(_Task(fails=rows[0])))) as data:
        data.take(0)
        data.take(1)
        with pytest.raises(LookupError, match=f"row {rows[0]}"):
            data.take(2)


def test_closing_leaves_no_thread():
    before = set(threading.enumerate())
    with closing(Prefetch(_parts(_Task()))) as data:
        data.take(0)
    assert set(threading.enumerate()) <= before


def test_scalars_of_a_batch_are_unchanged():
    moved = to_device({"rows": torch.ones(2), "lengths": [1, 2]}, torch.device("meta"))
    assert moved["rows"].is_meta
    assert moved["lengths"] == [1, 2]


class Fails(SupervisedFineTuning):
    """Collate three times, once per step, and then fail."""

    times = 0

    def collate(self, rows: Sequence[Row]) -> Batch:
        self.times += 1
        if self.times > 3:
            raise LookupError("no such row")
        return super().collate(rows)


def test_steps_before_a_data_failure_complete(make_bench):
    bench = make_bench(
        task="tests.unit.train_loop.test_prefetch:Fails", training={"micro_batch_size": 4}
    )
    with pytest.raises(LookupError, match="no such row"):
        bench.train_here()
    steps = [event.step for event in events_of(bench.workspace, TrainingStep)]
    assert steps == [1, 2, 3]


def test_waiting_share_is_reported(make_bench):
    bench = make_bench(training={"micro_batch_size": 4})
    bench.train_here()
    assert result_of(bench).outcome == "finished"
    shares = [event.data_wait for event in events_of(bench.workspace, TrainingStep)]
    assert all(0 < share < 1 for share in shares)
