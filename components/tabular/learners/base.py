"""What all learners of tables share."""

from __future__ import annotations

import dataclasses
import math
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_sections import TABULAR_MULTI_LABEL
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord, Side
from steadytrain.components.tabular import model as exported
from steadytrain.components.tabular.columns import Table
from steadytrain.components.tabular.encoder import FEATURES, fit_texts, parsed
from steadytrain.components.tabular.model import (
    LabelSetsModel,
    Preparation,
    TableModel,
    log_probabilities,
    odds_of,
    plain_number,
)
from steadytrain.components.tasks.base import Row
from steadytrain.components.tasks.encoding.base import COLUMNS
from steadytrain.components.tasks.scoring.table import class_counts, read_batches
from steadytrain.components.train.framework import Learned
from steadytrain.components.train.framework.learner import State
from steadytrain.components.train.framework.lightgbm import RATE, ROUNDS, threads_for

MODULE: Final = "model.py"
"""File of an exported model that can load it."""

Array = npt.NDArray[np.float64]


def read_table(data: DataRecord) -> Table:
    """Return the columns of prepared data."""
    return Table.model_validate_json(data.path(COLUMNS).read_text(encoding="utf-8"))


class OneLabel(DataRecord):
    """Prepared data with sets of labels, of which one label counts: the classes are no and yes.

    index: of the label.
    """

    index: int

    @classmethod
    def of(cls, data: DataRecord, index: int) -> OneLabel:
        """Return the data for one label."""
        return cls.model_construct(**{**dict(data), "labels": ["no", "yes"], "index": index})


def read_side(data: DataRecord, side: Side) -> tuple[list[Mapping[str, Any]], Array]:
    """Return the records of a side, and their classes or numbers: (records,).

    Of records with sets of labels, 1 for each label that they have: (records, labels).

    Raises:
        DataError: a shard is corrupted.
    """
    records, labels = list[Mapping[str, Any]](), list[Array]()
    for batch in read_batches(data, side, [FEATURES, "label"]):
        records += parsed(batch)
        labels.append(_targets(batch.column("label"), data))
    return records, np.concatenate(labels) if labels else np.zeros(0)


def _targets(column: Any, data: DataRecord) -> Array:
    if not pa.types.is_list(column.type):
        result: Array = column.to_numpy().astype(np.float64)
        return result
    sets = column.to_pylist()
    if isinstance(data, OneLabel):
        return np.array([data.index in labels for labels in sets], np.float64)
    flags = np.zeros((len(sets), len(data.labels)))
    for row, places in enumerate(sets):
        flags[row, places] = 1
    return flags


class TableLearner:
    """Learns all records of the training side in each step.

    model_type: its name in `model.config`.
    settings: what else `model.config` may have.
    has_rate: whether it reads `training.learning_rate`.
    needs_classes: whether it cannot learn from a training side that lacks a class.
    learns_sets: whether it has an output for each of several labels of a record. Otherwise, one
        learner for each label learns whether records have it (`LabelSetsLearner`).
    sets: whether records have any number of labels.
    weighs: whether records can weigh differently.
    row_weights: what each record of the training side weighs, 1 on average; None if all the same.
    monotone: of each column of the matrix, whether outputs must rise (1) or fall (-1) with it.
    """

    learns_all = True
    on_cpu = True
    metric = "loss"
    greater_is_better = False
    parameters = 0
    model_type: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ()
    has_rate: ClassVar[bool] = False
    needs_classes: ClassVar[bool] = True
    learns_sets: ClassVar[bool] = False
    weighs: ClassVar[bool] = True

    def __new__(cls, config: RunConfig, data: DataRecord) -> TableLearner:
        if not _has_sets(config, data) or cls.learns_sets:
            return super().__new__(cls)
        return LabelSetsLearner(cls, config, data)

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.labels = config, data.labels
        self.sets = _has_sets(config, data)
        self.given = {name: it for name, it in config.model.config.items() if name != "model_type"}
        self._check_settings()
        self.seed = config.training.seed
        records, self.targets = read_side(data, "train")
        if self.needs_classes:
            self._check_classes()
        self.row_weights = self._weights(records)
        validation, self.held_out_targets = read_side(data, "validation")
        self.preparation = Preparation(read_table(data).features)
        self.preparation.fit(records)
        self.preparation.texts = dict(fit_texts(self.preparation.kinds, records))
        self.matrix = self.preparation.matrix(records, strict=False)
        self.held_out_matrix = self.preparation.matrix(validation, strict=False)
        self.monotone = self._monotone(self.given.pop("monotone", {}))
        self.threads = threads_for(self.matrix.size, config.compute)

    def _check_settings(self) -> None:
        kind = self.config.model.config.get("model_type")
        if kind != self.model_type:
            raise BadInput(
                f"model.config.model_type = {kind!r}: model.framework "
                f"{self.config.model.framework} trains {self.model_type}",
                remedy=f"set it to {self.model_type}",
            )
        rate = self.config.training.learning_rate
        if rate is not None and not self.has_rate:
            raise BadInput(
                f"training.learning_rate = {rate:g}: model_type {self.model_type} has none",
                remedy="leave it out",
            )
        for name in self.given.keys() - {*self.settings}:
            raise BadInput(
                f"model.config.{name} = {self.given[name]!r}: {self.model_type} has no such "
                "setting",
                remedy=f"use {', '.join(sorted(self.settings))}"
                if self.settings
                else "leave it out",
            )

    def _weights(self, records: Sequence[Mapping[str, Any]]) -> Array | None:
        settings, column = self.config.training.class_weights, self.config.data.columns.weight
        weights = None
        if column:
            weights = np.array([plain_number(record[column]) for record in records])
        if settings.on:
            from steadytrain.components.techniques.rare_classes.weights import class_weights

            of_class: Any = class_weights(settings, self.labels, self._counts)
            mine = of_class.numpy().astype(np.float64)[self.targets.astype(int)]
            weights = mine if weights is None else weights * mine
        if weights is None or self.weighs:
            return None if weights is None else weights / weights.mean()
        field = "data.columns.weight" if column else "training.class_weights"
        raise BadInput(
            f"{field}: in model_type {self.model_type}, all records weigh the same",
            remedy="leave it out, or use another model",
        )

    def _counts(self) -> npt.NDArray[np.int64]:
        return np.bincount(self.targets.astype(int), minlength=len(self.labels))

    def _monotone(self, given: Any) -> npt.NDArray[np.int64]:
        names, kinds = self.preparation.columns, self.preparation.kinds
        result = np.zeros(len(names), int)
        for name, sign in (given if isinstance(given, dict) else {"": given}).items():
            of_numbers = kinds.get(name) == "number"
            if not of_numbers or sign not in (1, -1) or isinstance(sign, bool):
                wrong = f"{name!r} is no column of numbers to learn from"
                raise BadInput(
                    f"model.config.monotone = {given!r}: "
                    + ("it does not map columns to 1 or -1" if of_numbers or not name else wrong),
                    remedy="write {column: 1} for outputs that rise with the column, or -1",
                )
            result[self.preparation.places[name]] = sign
        if result.any() and self.outputs > 1:
            raise BadInput(
                f"model.config.monotone = {given!r}: with {self.outputs} classes, none of them "
                "rises alone",
                remedy="leave it out, or predict two classes or a number",
            )
        return result

    def refused(self, error: Exception) -> BadInput:
        """Return the error about settings that a library refuses."""
        return BadInput(
            f"model.config: {self.model_type} refuses these settings: {error}",
            remedy="fix the setting that it names",
        )

    def _check_classes(self) -> None:
        """Raise BadInput if a class has no record to learn it from."""
        if self.sets:
            return
        seen = {*self.targets.astype(int).tolist()} if self.labels else set[int]()
        if absent := [name for index, name in enumerate(self.labels) if index not in seen]:
            raise BadInput(
                f"no training record has the class {absent[0]!r}, so {self.model_type} does not "
                "learn it",
                remedy="leave it out of data.labels, or give more data",
            )

    @property
    def outputs(self) -> int:
        """Number of raw outputs: one for a number or for two classes, else one for each class."""
        return len(self.labels) if self.sets or len(self.labels) > 2 else 1

    def base(self) -> list[float]:
        """Return the best constant outputs: the mean, or the logarithms of the classes' shares.

        Of sets of labels, the logarithms of each label's odds.
        """
        if self.sets:
            weights = np.ones(len(self.targets)) if self.row_weights is None else self.row_weights
            having, lacking = weights @ self.targets, weights @ (1 - self.targets)
            odds: list[float] = (np.log(having + 1) - np.log(lacking + 1)).tolist()
            return odds
        if not self.labels:
            return [float(np.average(self.targets, weights=self.row_weights))]
        logs = np.log(self.shares())
        return [float(logs[1] - logs[0])] if len(logs) == 2 else logs.tolist()

    def shares(self) -> Array:
        """Return the shares of the classes.

        Each class counts once more than it occurs, so that none has a probability of 0.
        """
        result: Array = (self.counted() + 1) / (self.counted() + 1).sum()
        return result

    def counted(self) -> Array:
        """Return what the records of each class weigh together."""
        classes = self.targets.astype(int)
        return np.bincount(classes, self.row_weights, len(self.labels)).astype(np.float64)

    def training_loss(self, raw: Array) -> float:
        """Return the mean loss of the training side, with the weights of its records."""
        return float(np.average(self.losses(raw, self.targets), weights=self.row_weights))

    def losses(self, raw: Array, targets: Array) -> Array:
        """Return the loss of each row: (rows,), in nats, or the squared error of a number.

        That of a set of labels is the mean over all labels.
        """
        if not self.labels:
            return np.square(raw[:, 0] - targets)
        if self.sets:
            each: Array = (np.logaddexp(0, raw) - targets * raw).mean(axis=1)
            return each
        result: Array = -log_probabilities(raw)[np.arange(len(targets)), targets.astype(int)]
        return result

    def validate(self, rows: Iterable[Row]) -> Mapping[str, float]:
        del rows
        raw, targets = self.held_out(), self.held_out_targets
        loss = float(self.losses(raw, targets).mean())
        if not self.labels:
            absolute = float(np.abs(raw[:, 0] - targets).mean())
            return {"loss": loss, "rmse": math.sqrt(loss), "mae": absolute}
        if self.sets:
            return {"loss": loss, **_set_metrics(raw >= 0, targets > 0)}
        hits = log_probabilities(raw).argmax(axis=1) == targets
        return {"loss": loss, "accuracy": float(hits.mean())}

    @abstractmethod
    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned: ...

    @abstractmethod
    def state(self) -> State: ...

    @abstractmethod
    def restore(self, state: State) -> None: ...

    def held_out(self) -> Array:
        """Return the raw outputs for the validation side: (rows, outputs)."""
        result: Array = self.model().raw(self.held_out_matrix)
        return result

    @abstractmethod
    def model(self) -> TableModel:
        """Return what has been learned so far."""

    def export(self, folder: Path) -> None:
        self.model().save(folder)
        shutil.copyfile(exported.__file__, folder / MODULE)


def _has_sets(config: RunConfig, data: DataRecord) -> bool:
    return config.data.task == TABULAR_MULTI_LABEL and not isinstance(data, OneLabel)


def _set_metrics(predicted: Any, truth: Any) -> dict[str, float]:
    """Return how good predicted labels are.

    As on the test side, a label that is neither true nor predicted does not count.

    Args:
        predicted, truth: (rows, labels).
    """
    hits, seen = (predicted & truth).sum(axis=0), predicted.sum(axis=0) + truth.sum(axis=0)
    each = 2 * hits[seen > 0] / seen[seen > 0]
    return {
        "micro_f1": float(2 * hits.sum() / max(1, seen.sum())),
        "macro_f1": float(each.mean()) if len(each) else 0.0,
        "subset_accuracy": float((predicted == truth).all(axis=1).mean()),
    }


class ConstantLearner(TableLearner):
    """Predicts the mean, or the shares of the classes, whatever the record is."""

    model_type = "dummy"
    needs_classes = False
    learns_sets = True

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        del rows
        raw = self.model().raw(self.matrix)
        return Learned(self.training_loss(raw), learning_rate_scale)

    def model(self) -> TableModel:
        result = TableModel(self.preparation, self.labels, self.base())
        result.sets = self.sets
        return result

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        del state


class LabelSetsLearner(TableLearner):
    """A step is one of each label's learner. They stop together.

    A label that every training record has, or none, gets a constant probability where the learner
    needs both classes, as in scikit-learn's OneVsRestClassifier.
    """

    def __new__(cls, *_: Any) -> Self:
        return object.__new__(cls)

    def __init__(self, made: type[TableLearner], config: RunConfig, data: DataRecord) -> None:
        self.config, self.labels, self.sets = config, data.labels, True
        self.model_type = made.model_type  # type: ignore[misc]
        counts, rows = class_counts(data), data.sides["train"].rows
        constant = made.needs_classes & ((counts == 0) | (counts == rows))
        self.learners = [
            ConstantLearner(_without_settings(config), OneLabel.of(data, index))
            if constant[index]
            else made(config, OneLabel.of(data, index))
            for index in range(len(data.labels))
        ]
        self.preparation = self.learners[0].preparation
        self.held_out_targets = np.stack([each.held_out_targets for each in self.learners], axis=1)

    @property
    def parameters(self) -> int:  # type: ignore[override]
        return sum(each.parameters for each in self.learners)

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        losses = [
            each.learn(rows, learning_rate_scale=learning_rate_scale) for each in self.learners
        ]
        mean = float(np.mean([each.loss for each in losses]))
        return dataclasses.replace(losses[0], loss=mean)

    def held_out(self) -> Array:
        return np.stack([odds_of(each.held_out()) for each in self.learners], axis=1)

    def state(self) -> State:
        return {
            f"{index}.{name}": value
            for index, each in enumerate(self.learners)
            for name, value in each.state().items()
        }

    def restore(self, state: State) -> None:
        parts = [dict[str, Any]() for _ in self.learners]
        for key, value in state.items():
            index, _, name = key.partition(".")
            parts[int(index)][name] = value
        for each, part in zip(self.learners, parts, strict=True):
            each.restore(part)

    def model(self) -> TableModel:
        members = [each.model() for each in self.learners]
        return LabelSetsModel(self.preparation, self.labels, [], members=members)


def _without_settings(config: RunConfig) -> RunConfig:
    """Return the configuration of a learner of constants."""
    model = config.model.model_copy(update={"config": {"model_type": ConstantLearner.model_type}})
    training = config.training.model_copy(update={"learning_rate": None})
    return config.model_copy(update={"model": model, "training": training})


class TreesLearner(TableLearner):
    """A step adds `model.config.rounds_per_step` trees, for each output where trees are boosted.

    Their random numbers depend on the number of steps alone. So an interrupted training run
    continues with the very same trees.

    parts: the trees of each step.
    raw, raw_held_out: what all trees add up to, for both sides: (rows, outputs).
    """

    has_rate = True
    parts: list[bytes]
    raw: Array
    raw_held_out: Array

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        super().__init__(config, data)
        self.rounds = self.given.pop("rounds_per_step", ROUNDS)
        if type(self.rounds) is not int or self.rounds < 1:
            raise BadInput(
                f"model.config.rounds_per_step = {self.rounds!r}: it is not a whole number above 0",
                remedy=f"use a number of trees such as {ROUNDS}",
            )
        self.rate = config.training.learning_rate or RATE
        self.restore({"trees": np.zeros(0, np.uint8), "sizes": np.zeros(0, np.int64)})

    def start(self) -> list[float]:
        """Return what the trees are added to."""
        return self.base()

    def raw_outputs(self, sums: Array) -> Array:
        """Return the raw outputs of what trees add up to."""
        return sums

    @abstractmethod
    def next_part(self, rate: float) -> bytes:
        """Return the trees of the next step."""

    @abstractmethod
    def added(self, part: bytes, *matrices: Array) -> tuple[int, list[Array]]:
        """Return the number of a step's leaves, and what its trees add for each matrix."""

    def learn(self, rows: Sequence[Row], *, learning_rate_scale: float) -> Learned:
        del rows
        rate = self.rate * learning_rate_scale
        self._add(self.next_part(rate))
        return Learned(self.training_loss(self.raw_outputs(self.raw)), rate)

    def _add(self, part: bytes) -> None:
        leaves, (seen, held_out) = self.added(part, self.matrix, self.held_out_matrix)
        self.parts.append(part)
        self.parameters += leaves
        self.raw, self.raw_held_out = self.raw + seen, self.raw_held_out + held_out

    def held_out(self) -> Array:
        return self.raw_outputs(self.raw_held_out)

    def state(self) -> State:
        sizes = np.array([len(part) for part in self.parts], np.int64)
        return {"trees": np.frombuffer(b"".join(self.parts), np.uint8).copy(), "sizes": sizes}

    def restore(self, state: State) -> None:
        self.parts, self.parameters = [], 0
        self.raw = np.tile(self.start(), (len(self.targets), 1))
        self.raw_held_out = np.tile(self.start(), (len(self.held_out_targets), 1))
        ends = np.cumsum(state["sizes"]).tolist()
        for start, end in pairwise([0, *ends]):
            self._add(state["trees"][start:end].tobytes())
