"""What training on a table takes: its matrix, and the threads that learn from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa

from steadytrain.components.plan.prepared_sample import known_data
from steadytrain.components.plan.step_time import Measured, measured, time_lines
from steadytrain.components.plan.stored import Stored
from steadytrain.components.preprocess.data_card import first_records
from steadytrain.components.preprocess.inputs import inputs_of
from steadytrain.components.preprocess.validate import Checked, no_records
from steadytrain.components.shared.class_names import in_order
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import TABULAR_MULTI_LABEL
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.quantities import size
from steadytrain.components.sizing.hardware import PriceTable, own_prices
from steadytrain.components.sizing.length import prepared, total_steps
from steadytrain.components.sizing.time_cost import Span
from steadytrain.components.tabular.columns import Table
from steadytrain.components.tabular.learners.base import read_table
from steadytrain.components.tabular.model import Preparation
from steadytrain.components.tasks.base import open_encoder
from steadytrain.components.tasks.encoding.base import (
    Content,
    Fitted,
    class_reader,
)
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.train.framework.ensemble import EnsembleLearner
from steadytrain.components.train.framework.lightgbm import ROUNDS, threads_for
from steadytrain.components.train.step import load_trainer

_READ: Final = 20_000
"""Records that are read of data that are not prepared."""
_BOOSTED: Final = ("xgboost", "lightgbm", "catboost")
_DEPTH: Final = 6
"""Levels of a tree by XGBoost's default, and assumed for the others."""
_VALUES_PER_SECOND: Final = (1e8, 3.2e8)
"""Values that a thread adds to histograms. The fast end was measured with XGBoost on one core
(200,000 and 400,000 rows of 30 columns); the slow one is an assumption."""
_BYTES: Final = 8
"""Of a value: the matrix is in float64."""
_BYTES_OF_TREES: Final = {
    "lightgbm": (4_200, 260, 110, 0),
    "xgboost": (1_000, 300, 175, 0),
    "catboost": (10_000, 300, 18, 9),
}
"""Bytes of a step's trees, and more for each tree, leaf, and further output of a leaf: only leaves
of CatBoost have several, the others grow a tree for each. Trees with 31 to 127 leaves, for two and
for five classes, took 4 to 25 % less."""
_LEAVES: Final = 31
"""Most leaves of a tree by LightGBM's default, and of one that CatBoost grows by leaves."""
_DEEPEST: Final = 40
"""Levels beyond which a limit on them limits nothing."""


@dataclass(frozen=True)
class TablePlan:
    """Everything that `steadytrain plan` reports of a table.

    rows: of the training and the validation side; without prepared data, of all sides. None if
        there are more than a plan reads.
    columns: those that are learned from.
    width: columns of the matrix; a date has several.
    memory: bytes of the matrix. None if `rows` is.
    source: where this comes from.
    hours: of training, without reading the data and validation. None if it is not known, and then
        `unknown_time` says why.
    timed_by: where the hours are from.
    usd_per_hour: of the cores that it trains on; None if their price is unknown.
    prices: where that is from.
    stored: at most, after all steps. None if it is not known.
    """

    framework: str
    model: str
    rows: int | None
    columns: int
    width: int
    memory: int | None
    threads: int | None
    steps: int
    remarks: list[str]
    source: str
    hours: Span | None
    timed_by: str
    unknown_time: str
    usd_per_hour: float | None
    prices: str
    stored: Stored | None
    works: ClassVar = True

    def as_data(self) -> dict[str, Any]:
        """Return the plan for programs."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield the plan for people."""
        unknown = "not known: run `steadytrain step preprocess FILE` first"
        yield f"model    {self.model}, by {self.framework}, on this CPU"
        yield f"rows     {unknown if self.rows is None else f'{self.rows:,}'}"
        yield f"columns  {self.columns:,} to learn from, {self.width:,} in the matrix"
        matrix = f"{size(_BYTES * self.width * 1e6)} for each million rows"
        yield f"matrix   {matrix if self.memory is None else size(self.memory)}"
        yield f"threads  {unknown if self.threads is None else self.threads}"
        yield f"steps    {self.steps:,}, each with all records of the training side"
        if self.hours is not None:
            yield from time_lines(self.hours, f" by {self.timed_by}", self.usd_per_hour)
        else:
            yield f"time     not known: {self.unknown_time}"
        yield f"source   {self.source}"
        yield from (f"  remark: {remark}" for remark in self.remarks)


def plan_table(
    config: RunConfig,
    data_bytes: int | None = None,
    prices: PriceTable | None = None,
    *,
    calibrate: bool = False,
    hours: bool = False,
) -> TablePlan:
    """Plan a training run on a table, from its prepared data or from its first records.

    Args:
        data_bytes: of all data, if the files here are a sample of them.
        prices: of cores. None means steadytrain's own.
        calibrate: whether to time real steps on this machine.
        hours: whether to time them if there is no formula and they can be timed.

    Raises:
        BadInput, DataError: the data cannot be used, or are too large for a sample.
    """
    data = prepared(config)
    rows: int | None
    if data_bytes is not None:
        table, rows, labels, source = _scaled(config, data_bytes)
    elif data is None:
        table, rows, labels, source = _first(config)
    else:
        table, labels, source = read_table(data), len(data.labels), "the prepared data"
        rows = data.sides["train"].rows + data.sides["validation"].rows
    width = len(Preparation(table.features).columns)
    threads = None if rows is None else threads_for(rows * width, config.compute)
    # A step has all rows, so it is an epoch.
    steps = total_steps(config.training, 1, 1)
    # A record with a set of labels is learned once for each of them.
    models = labels if config.data.task == TABULAR_MULTI_LABEL else 1
    prices = prices or own_prices()
    timed_by = "formula"
    if config.model.framework in _BOOSTED and not calibrate:
        time, unknown = _hours(config, rows, width, steps * models, threads or 1)
        stored = _stored_trees(config, rows, labels, steps * models)
    elif calibrate or hours:
        timed_by = "a step on this machine"
        time, stored, unknown = _of_steps(config, steps, data_bytes, strict=calibrate)
    else:
        time, stored, unknown = None, None, "`steadytrain plan FILE` times a step"
    return TablePlan(
        framework=config.model.framework,
        model=str(config.model.config["model_type"]),
        rows=rows,
        columns=len(table.features),
        width=width,
        memory=None if rows is None else _BYTES * rows * width,
        threads=threads,
        steps=steps,
        remarks=list(table.remarks()),
        source=source,
        hours=time,
        timed_by=timed_by,
        unknown_time=unknown,
        usd_per_hour=None if prices.core is None else prices.core * (threads or 1),
        prices=prices.origin,
        stored=stored,
    )


def _of_steps(
    config: RunConfig, steps: int, data_bytes: int | None, *, strict: bool
) -> tuple[Span | None, Stored | None, str]:
    """Return the same as `_hours`, and what is stored, from real steps.

    Args:
        strict: whether to raise the error of a step that cannot be timed.
    """
    try:
        step = _measured(config, steps, data_bytes)
    except (BadInput, DataError) as error:
        if strict:
            raise
        return None, None, f"a step cannot be timed here: {error.message}"
    hours = steps * step.seconds / 3600
    return Span.of(hours), step.stored, ""


def _measured(config: RunConfig, steps: int, data_bytes: int | None) -> Measured:
    """Measure real steps.

    Raises:
        BadInput, DataError: the data or the model cannot be used here.
    """
    framework = config.model.framework
    new = getattr(load_trainer(framework), "learner", None)
    if new is None:
        raise BadInput(
            f"model.framework = {framework!r}: it has no learner to time", remedy="time a run"
        )
    with known_data(config, data_bytes) as known:
        learner = new(config, known.record)
        if not isinstance(learner, EnsembleLearner):
            return measured(learner, steps, known.scale)
        counts = [item.max_steps for item in learner.members]
        members = [
            measured(learner.member(index), count, known.scale)
            for index, count in enumerate(counts)
        ]
        return Measured.of_ensemble(members, counts)


def _stored_trees(config: RunConfig, rows: int | None, labels: int, steps: int) -> Stored | None:
    """Return the most that boosted trees store: all trees with as many leaves as they may have.

    None if nothing limits the leaves but a number of rows that is not known.

    Args:
        labels: number of classes; 0 for numbers.
        steps: all steps, of all models.
    """
    given, framework = config.model.config, config.model.framework
    by_leaves = framework == "lightgbm" or given.get("grow_policy") in ("lossguide", "Lossguide")
    depth = next(
        (int(given[name]) for name in ("max_depth", "depth") if given.get(name) is not None),
        0 if by_leaves else _DEPTH,
    )
    leaves = given.get("num_leaves", given.get("max_leaves"))
    if leaves is None and by_leaves and framework != "xgboost":
        leaves = _LEAVES
    limits = [2 ** min(depth, _DEEPEST)] if depth > 0 else []
    limits += [int(limit) for limit in (leaves, rows) if limit]
    if not limits:
        return None
    outputs = labels if labels > 2 and config.data.task != TABULAR_MULTI_LABEL else 1
    step, tree, leaf, output = _BYTES_OF_TREES[framework]
    trees = int(given.get("rounds_per_step", ROUNDS)) * (1 if output else outputs)
    size = steps * (step + trees * (tree + min(limits) * (leaf + output * (outputs - 1))))
    return Stored(size, size)


def _hours(
    config: RunConfig, rows: int | None, width: int, steps: int, threads: int
) -> tuple[Span | None, str]:
    """Return the hours of boosting, and why they are not known if they are not.

    A tree of some depth adds each value of the matrix to a histogram once for each level.
    """
    given = config.model.config
    if rows is None:
        return None, "the number of rows is not known before `steadytrain step preprocess FILE`"
    levels = int(given.get("max_depth") or given.get("depth") or _DEPTH)
    levels = levels if levels > 0 else _DEPTH
    work = rows * width * levels * steps * int(given.get("rounds_per_step", ROUNDS))
    slow, fast = (each * 3600 for each in _VALUES_PER_SECOND)
    # Threads share the memory's bandwidth, so at worst only half of the others count.
    return Span(work / fast / threads, work / slow / ((1 + threads) / 2)), ""


def _scaled(config: RunConfig, data_bytes: int) -> tuple[Table, int, int, str]:
    """Return the same as `_first`, with the number of rows of data with that many bytes.

    Raises:
        BadInput, DataError: as for `plan_table`.
    """
    table, rows, labels, _ = _first(config)
    known = inputs_of(config).stored_bytes
    if not rows or not known:
        raise BadInput(
            f"data.source = {config.data.source}: these are too many records for a sample",
            remedy=f"give one file on this machine with fewer than {_READ:,} records",
        )
    scaled = round(rows * data_bytes / known)
    source = f"{rows:,} records of a sample, scaled to {size(data_bytes)} of data"
    return table, scaled, labels, source


def _first(config: RunConfig) -> tuple[Table, int | None, int, str]:
    """Return the columns of the first records, their number if there are no more, and the source.

    The third value is the number of their labels.

    Raises:
        BadInput, DataError: as for `plan_table`.
    """
    encoder: Any = open_encoder(config.data)
    records = [one for _, _, one in islice(first_records(config, encoder, _READ), _READ)]
    if not records:
        raise no_records(config.data)
    good = [one for one in records if isinstance(one, Checked)]
    if not good:
        why = next((f": {one}" for one in records if isinstance(one, Defect)), "")
        raise DataError(
            f"none of the first {len(records):,} records can be used{why}",
            remedy="check data.target and data.columns; `steadytrain show-data` shows the records",
        )
    classes = (class_reader(encoder)(one.label) for one in good if one.label is not None)
    labels = tuple(in_order({*chain.from_iterable(classes)}))
    rows = encoder.row_encoder(Fitted(None, labels, frozenset(labels), Path()))
    encoded = rows.encode([Content(one.content, one.label) for one in good])
    values = [row.values for one in encoded if not isinstance(one, Defect) for row in one.rows]
    table = pa.Table.from_pylist(values, schema=encoder.schema)
    described = encoder.describe({"train": [table], "validation": [], "test": []})
    inputs = inputs_of(config)
    # If there are several files, not all records are read.
    if len(inputs.files) + len(inputs.datasets) == 1 and len(records) < _READ:
        return described, len(good), len(labels), "all records, before they are split"
    return described, None, len(labels), f"the first {len(records):,} records"
