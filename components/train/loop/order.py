"""The training order: which rows make up a global batch, and how long their documents are.

An order is an endless stream of rows. Step s uses the rows that start at position s * global batch.
So the step alone determines the position, and neither micro-batch nor world size changes which rows
make up a global batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from accelerate import Accelerator

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import RunConfig, TrainingConfig
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.sizing.length import mixture_of as sources_of
from steadytrain.components.tasks.base import TrainingTask
from steadytrain.components.techniques.curriculum import CUTS
from steadytrain.components.techniques.curriculum.order import (
    Curriculum,
    SequenceLength,
    difficulty_of,
)
from steadytrain.components.techniques.multi_task.weights import mixture_of
from steadytrain.components.techniques.order import Order
from steadytrain.components.train.failures import naming
from steadytrain.components.train.loop.control import Watch
from steadytrain.components.train.loop.data import Rows
from steadytrain.components.train.loop.row_losses import row_losses


@runtime_checkable
class OrderType(Protocol):
    """What an entry point in `steadytrain.orders` refers to: it creates an order.

    An attribute `column` names a column of numbers, which the order then gets as `values`.
    """

    def __call__(
        self,
        rows: int,
        seed: int,
        lengths: npt.NDArray[np.int32] | None,
        batch: int,
        **options: Any,
    ) -> Order:
        """Create the order.

        Args:
            rows: number of rows, at least 1.
            lengths: tokens of each row; None if the task packs rows instead of padding them.
            batch: rows in a global batch.
            options: `training.order_options`. An order without options need not take any.
        """


def order_of(rows: Rows, task: TrainingTask, training: TrainingConfig) -> Order:
    """Return the configured order for a task.

    Raises:
        DataError: there are no rows.
        BadInput: as for `load_order`, or the order is something else.
        PluginFailed: creating the order raised an exception.
    """
    if not len(rows):
        raise DataError(
            "the training side has no rows", remedy="give more data, or smaller held-out shares"
        )
    # A user-defined task may not have this attribute.
    column = getattr(task, "padded", "")
    name, options = training.order, training.order_options
    create = load_order(name, options)
    lengths = rows.lengths(column) if column else None
    given = {"values": _values(rows, create, name)} if _column(create) else {}
    with naming(f"training.order = {name!r}", "create"):
        order = create(
            len(rows), training.seed, lengths, training.global_batch_size, **options, **given
        )
    if not isinstance(order, Order):
        raise BadInput(
            f"training.order = {name!r} creates {order!r:.80}, which has no take(position, count)",
            remedy="return an order, or choose another one",
        )
    return _Checked(order, name, len(rows))


def load_order(name: str, options: Mapping[str, Any]) -> OrderType:
    """Return what creates an order.

    Raises:
        BadInput: no installed package provides it, it cannot be used, or it does not take the
            options.
    """
    create = plugins.load_as(plugins.ORDERS, name, OrderType)
    signature = inspect.signature(create)
    given = {"values": None} if _column(create) else {}
    try:
        signature.bind(1, 0, None, 1, **options, **given)
    except TypeError as error:
        raise BadInput(
            f"training.order = {name!r} cannot be created with training.order_options = "
            f"{dict(options)}: {error}",
            remedy=f"it takes {signature}: after rows, seed, lengths and batch, its options",
        ) from error
    return create


def _column(create: OrderType) -> str:
    return str(getattr(create, "column", ""))


def _values(rows: Rows, create: OrderType, name: str) -> npt.NDArray[np.int64]:
    """Return the numbers of the column that an order reads."""
    column = _column(create)
    if column not in rows.columns:
        raise BadInput(
            f"training.order = {name!r}: it reads the column {column!r}, and the rows have "
            f"{', '.join(rows.columns)}",
            remedy="use another order, or a task whose rows have that column",
        )
    return rows.values(column)


class _Checked:
    """Names the order if it raises an exception, or returns anything but rows that exist."""

    def __init__(self, order: Order, name: str, rows: int) -> None:
        self.order, self.name, self.rows = order, name, rows

    def take(self, position: int, count: int) -> Sequence[int]:
        with naming(f"training.order = {self.name!r}", "take"):
            rows = self.order.take(position, count)
            taken = list(rows) if isinstance(rows, Iterable) else None
        if taken is None:
            raise self._wrong(position, count, f"{rows!r:.80}")
        if len(taken) != count:
            raise self._wrong(position, count, f"{len(taken)} rows")
        for row in taken:
            if not isinstance(row, int | np.integer):
                raise self._wrong(position, count, f"the {type(row).__name__} {row!r:.80}")
        if not 0 <= min(taken) <= max(taken) < self.rows:
            raise self._wrong(position, count, f"rows {min(taken)} to {max(taken)}")
        return taken

    def _wrong(self, position: int, count: int, returned: str) -> BadInput:
        return BadInput(
            f"training.order = {self.name!r}: take({position}, {count}) returned {returned}",
            remedy=f"return {count} indices from 0 to {self.rows - 1}, or choose another order",
        )


def run_order(
    config: RunConfig,
    data: DataRecord,
    rows: Rows,
    task: TrainingTask,
    accelerator: Accelerator,
    watch: Watch,
    *,
    steps: int,
) -> Order:
    """Return which rows make up each global batch.

    Args:
        rows: of the training side.
        watch: what this rank does while a curriculum's reference model scores the rows.
        steps: of the full training run.

    Raises:
        BadInput, DataError, PluginFailed: as for `order_of`, `difficulty_of` and `row_losses`.
        StoppedEarly: as for `row_losses`.
    """
    training = config.training
    if (mixture := sources_of(training, data.sides["train"])) is not None:
        return mixture.order(training.seed)
    if training.multi_task.sampling != "size":
        return mixture_of(rows.values("label"), data.labels, training.multi_task, training.seed)
    order = order_of(rows, task, training)
    if not training.curriculum.orders:
        return order
    if training.curriculum.by == "loss":
        difficulty = row_losses(config, data, rows, accelerator, watch)
    else:
        difficulty = difficulty_of(rows, training.curriculum, getattr(task, "padded", ""))
    return Curriculum(
        order,
        difficulty,
        training.curriculum,
        seed=training.seed,
        batch=training.global_batch_size,
        steps=training.curriculum.steps(steps),
    )


def sequences_of(config: RunConfig, data: DataRecord, *, steps: int) -> SequenceLength | None:
    """Return what cuts the documents of early steps; None if nothing does.

    Args:
        steps: of the full training run.
    """
    training = config.training
    if training.curriculum.by != CUTS:
        return None
    return SequenceLength(
        training.curriculum,
        data.sequence_length or config.data.sequence_length,
        batch=training.global_batch_size,
        steps=training.curriculum.steps(steps),
    )
