"""The interface of a task: everything that depends on the kind of task. `load_task` finds one.

A task has four parts, and each step opens only those that it needs. Preprocessing opens the encoder
(`encoding/base.py`), training the training part and the packager, evaluation the scorer and the
packager, and registration the packager. The training loop, the gate and the registry know nothing
else about a task. They see no tokenizer and no text.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import DataConfig, RunConfig, TrainingConfig
from steadytrain.components.shared.digest import users_code_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.encoding.base import Encoder
from steadytrain.components.techniques.adversarial_training import Attack
from steadytrain.components.techniques.base import Batch as Batch
from steadytrain.components.techniques.base import Row as Row

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from steadytrain.components.shared.artifact import Artifact


Components = Mapping[str, Any]
"""A model loaded for evaluation: "model" and what belongs to it (a tokenizer, a processor)."""


FEW: Final = 50
"""Records that are predicted one by one to measure a model, if nothing else is asked for."""
MEASURED: Final = "measured"
"""In a micro-batch that is trained on: what `TrainingTask.measure` found in its global batch."""


@dataclass(frozen=True)
class LossSum:
    """The loss of a micro-batch before division.

    total: scalar, float32, differentiable: the sum over the targets.
    """

    total: torch.Tensor


class RowTeacher(Protocol):
    """A teacher that is asked about whole rows, before training begins."""

    def answer(self, rows: Sequence[Row], device: torch.device) -> list[Row]:
        """Return what it says about each row: the columns that the distillation stores."""


class Part:
    """A part of a task that keeps the configuration and the record of the prepared data."""

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data


class TrainingTask(Protocol):
    """What trains: the model, its batches, its loss, and its validation metrics.

    metric: the validation metric that selects the best model, for example "loss".
    greater_is_better: whether a higher metric is better.
    padded: the column whose lists are padded to the longest in the micro-batch. Rows of similar
        length are then batched together. Optional; empty means that nothing is padded.
    """

    metric: str
    greater_is_better: bool

    def build_model(self) -> torch.nn.Module:
        """Return the model to train: loaded, or from scratch (initialized from torch's global RNG).

        Raises:
            BadInput: the base model cannot be used with this data (no weights, a different
                vocabulary, or sequences longer than the model's maximum positions).
        """

    def extend(self, model: torch.nn.Module) -> None:
        """Add to the model, which may have adapters, what is trained with it but not exported.

        Optional. An example is the projection of a loss on hidden states. It must be the same on
        all ranks, and the forward pass must use it.
        """

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        """Prepare the model, adapters included, for `loss` before it is distributed over ranks.

        Optional.

        Returns:
            One sentence for each thing that is slower than it could be, with the reason.
        """

    def open_teacher(self, student: torch.nn.Module) -> RowTeacher:
        """Load the teacher of a distillation, whose answers are then stored.

        Optional; called only if `training.distillation.top_k` is set. `collate` then gets the
        answers as further columns of the rows.

        Raises:
            BadInput: it cannot teach this student.
        """

    def cost(self, row: Row) -> int:
        """Return the number of tokens (or other work units) in a row, the unit of throughput."""

    def draw(self, row: Row, position: int, *, training: bool) -> Row:
        """Return what is learned from a row, if that is random, such as which tokens are masked.

        Optional; a thread calls it, as it does `collate`. What it returns must depend on its
        arguments and the configuration alone: then it is the same after a resume, in a smaller
        micro-batch, and on other ranks.

        Args:
            position: of the row in the endless stream of training rows, which is new in each epoch;
                on the validation side, the row's index.
        """

    def collate(self, rows: Sequence[Row]) -> Batch:
        """Return a micro-batch of rows.

        A thread calls this one step ahead, so it must not use global random number generators. With
        `training.mixup`, each row also has `mixup.PARTNER` and `mixup.SHARE`.
        """

    def weight(self, batch: Batch) -> int:
        """Return the number of targets in a micro-batch.

        The loss of a global batch is divided by the total of these numbers.
        """

    def measure(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return a sum over a micro-batch. `compute_loss` depends on its mean in the global batch.

        Optional. It comes before the first loss of a step, without gradients. `compute_loss` then
        finds the sum over the global batch, divided by its targets, as `batch[MEASURED]`. The rows
        of training come with the row before them in the global batch, the first with the last, as
        `mixup.PARTNER`. So neither depends on the micro-batch.

        Returns:
            Scalar, float64.
        """

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        """Run the forward pass and return the summed loss."""

    def load_reference(self, address: str, field: str) -> torch.nn.Module:
        """Load another model of the same kind: frozen, in evaluation mode, in host memory.

        Optional, like `row_losses`: a curriculum by loss needs both, and `Task.grades`. From then
        on, `collate` returns what this model takes.

        Args:
            field: names the address in errors.

        Raises:
            BadInput: the model cannot be used with this data.
        """

    def row_losses(
        self, model: torch.nn.Module, batch: Batch, counts: Sequence[int]
    ) -> torch.Tensor:
        """Return the loss of each row, summed over its targets: (rows,), in nats.

        Args:
            model: from `load_reference`.
            counts: number of targets of each row, at least 1.
        """

    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        """Return sums over a micro-batch, which add up across batches and ranks.

        They always include "loss" (summed) and "weight" (number of targets).
        """

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Compute the metrics of the full validation side from the accumulated sums."""


class Scorer(Protocol):
    """What scores a loaded model on the raw records of the test side."""

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        """Score each record.

        Args:
            records: `id`, `group`, `slice`, and the columns of `Encoder.test_columns`.

        Returns:
            One row per record, in order: `id` (string), `group`, `slice` (string or null), `loss`
            (float64, nats, summed over the record's targets), `targets` (int64), `bytes` (int64,
            UTF-8 bytes of the scored text; 0 if there is no text). Classification adds `label`,
            `prediction` (int64) and `probabilities` (list<float32>, classes), and with several
            data sets `part` (int64), the one that the record belongs to. If a record has any number
            of labels, these are `labels` and `predictions` (list<int64>), and `thresholds`
            (list<float64>, classes). Regression, whose loss is relative to the variance of the
            training side, adds `target`, `predicted`, `squared_error` and `absolute_error`
            (float64), and forecasts `scaled_error`, `symmetric_error` and `pinball` as well, and
            the ends of the interval (`low`, `high`) and the `ordinal` of the time.
            Metrics get any other column of numbers too.
        """

    def score_attacked(self, components: Components, records: pa.Table, attack: Attack) -> pa.Table:
        """Score each record while an attack perturbs its embeddings.

        Optional: only if `Task.robustness`.
        """

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        """Score each record as `score` does, with a model that is trivial, or that was not trained.

        The gate compares the candidate with it record by record, so `targets` and `bytes` must be
        those of `score`. A metric whose columns are missing is not compared.

        Returns:
            None if there is no such model, or nothing to score.
        """


class Packager(Protocol):
    """What writes a trained model, loads it, and logs it to MLflow."""

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        """Write the model as a plain folder for `load_exported` and the model's own library."""

    def load_exported(self, folder: Path) -> Components:
        """Load an exported folder for evaluation."""

    def load_base(self) -> Components:
        """Load model.base for evaluation, as it was before training. Optional.

        Raises:
            BadInput: the task cannot score it, because it lacks a head for the task, for example.
        """

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:
        """Log an exported model to the active MLflow run, with a signature and an input example.

        Returns:
            The model URI.
        """

    def load_logged(self, model_uri: str) -> Components:
        """Load a logged or registered model for evaluation."""

    def measured(self, folder: Path, records: pa.Table, *, most: int = FEW) -> Artifact:
        """Measure what an exported model costs its users. Optional; searches need it.

        Args:
            records: of a held-out side.
            most: how many of them are predicted one by one.
        """


@dataclass(frozen=True)
class Task:
    """One kind of task, as four functions that open its parts.

    A package adds it with an entry point in the group `steadytrain.tasks`. Preprocessing imports it
    where there is no torch, so the parts that need torch are named by `late`.

    language_model: whether it trains a language model with the model's own head. Only then can the
        head be frozen and quantized, and lm-eval score the model.
    objectives: those of `training` that its loss includes, by their field.
    sequences: sequences of up to `data.sequence_length` tokens in a row, for plans.
    reference: whether the loss compares the model with a frozen copy of model.base.
    measures: whether its training part has `measure`, which runs both models once more.
    robustness: whether its test records have a `text`, and its scorer `score_attacked`.
    grades: whether its training part has `load_reference` and `row_losses`.
    cuttable: whether it learns from any part of a document as from a whole one.
    targets: share of the tokens of a sequence that have a target, from the configuration; None if
        the data decide. Only of tasks whose loss skips the logits of all others.
    regresses: whether the targets are numbers, one for each row.
    frameworks: the values of `model.framework` that train it; empty if any may.
    reads: the fields of `training`, `model` and so on that it reads, for sections of which it does
        not read all. Another field of these sections is an error.
    tabular: whether it learns from the columns of a table, and in each step from all records.
    contrasts: whether it trains a model without a head, and all of its loss compares the texts of a
        micro-batch, whose number is `training.batch_contrastive.rows`.
    """

    encoder: Callable[[DataConfig], Encoder]
    training: Callable[[RunConfig, DataRecord], TrainingTask]
    scorer: Callable[[RunConfig, DataRecord], Scorer]
    packager: Callable[[RunConfig, DataRecord], Packager]
    language_model: bool = False
    objectives: frozenset[str] = frozenset()
    sequences: int = 1
    reference: bool = False
    measures: bool = False
    robustness: bool = False
    contrasts: bool = False
    regresses: bool = False
    grades: bool = False
    cuttable: bool = False
    tabular: bool = False
    frameworks: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    targets: Callable[[TrainingConfig], float] | None = None

    def metrics(self, config: RunConfig) -> Sequence[str] | None:
        """Return the names of the validation metrics; None if only the training part knows them.

        They belong to the training part. So a task that replaces it does not inherit them.
        """
        return _declared(self.training, config)

    def test_metrics(self, config: RunConfig) -> Sequence[str] | None:
        """Return which of steadytrain's metrics of the test side apply; None if unknown.

        They belong to the scorer. A package's metric reads whatever the scorer gives it.
        """
        return _declared(self.scorer, config)


def field_names(sections: Mapping[str, str]) -> frozenset[str]:
    """Return the names of fields, such as `data.task`, from those of each section in a text."""
    return frozenset(
        f"{section}.{field}" for section, fields in sections.items() for field in fields.split()
    )


def _declared(part: Callable[..., Any], config: RunConfig) -> Sequence[str] | None:
    declared = part.metrics if isinstance(part, Late) else None
    return declared(config) if declared else None


@dataclass(frozen=True)
class Late:
    """A part of a task that is imported from `module:name` when it is opened.

    Calling it raises BadInput if that cannot be imported.

    metrics: see `late`.
    """

    address: str
    metrics: Callable[[RunConfig], Sequence[str]] | None = None

    def __call__(self, config: RunConfig, data: DataRecord) -> Any:
        module, _, name = self.address.partition(":")
        with foreign(
            f"data.task = {config.data.task!r}: {self.address} cannot be imported",
            "install what it needs, or fix the package that the task comes from",
        ):
            part = getattr(importlib.import_module(module), name)
        return part(config, data)


def late(address: str, *, metrics: Callable[[RunConfig], Sequence[str]] | None = None) -> Late:
    """Return a function that imports `module:name` when it is called, and calls that.

    It raises BadInput if that cannot be imported.

    Args:
        metrics: of a training part: the names of its validation metrics, by the configuration, its
            `metric` first. With them, a wrong `training.metric_for_best_model` is an error before
            anything starts; without them, when training begins. Of a scorer: those of steadytrain's
            metrics that apply to its scores, for `gate.metric` and `gate.floors` in the same way.
    """
    return Late(address, metrics)


def load_task(name: str) -> Task:
    """Return the task that `data.task` names.

    Args:
        name: an entry point's name; or `module:name` of a Task, or of a class that trains for the
            built-in task in its attribute `task`, whose other parts are used with it.

    Raises:
        BadInput: it cannot be imported, or it is not a task.
    """
    result = _imported(name) if ":" in name else plugins.load(plugins.TASKS, name)
    if isinstance(result, Task):
        return result
    base = getattr(result, "task", "")
    if isinstance(result, type) and base in plugins.names(plugins.TASKS):
        return replace(load_task(base), training=result)
    raise BadInput(
        f"data.task = {name!r} is not a task but {result!r}",
        remedy=f"name a steadytrain.components.tasks.base.Task, {_known()}",
    )


def open_encoder(data: DataConfig) -> Encoder:
    """Return the encoder of the configured task.

    Raises:
        BadInput: the task cannot be imported, or does not take these settings.
    """
    return load_task(data.task).encoder(data)


@dataclass(frozen=True)
class OpenTask:
    """The parts of a run's task. Each is opened on first use, because most of them import torch.

    Raises:
        BadInput: the task, or the part that is opened, cannot be imported.
    """

    config: RunConfig
    data: DataRecord

    @cached_property
    def training(self) -> TrainingTask:
        result = self._task.training(self.config, self.data)
        if hasattr(result, "loss"):
            # Its old name. The training would use the loss of the base class instead.
            raise BadInput(
                f"data.task = {self.config.data.task!r}: the method `loss` of "
                f"{type(result).__name__} is not called",
                remedy="rename it to `compute_loss`",
            )
        return result

    @cached_property
    def scorer(self) -> Scorer:
        return self._task.scorer(self.config, self.data)

    @cached_property
    def packager(self) -> Packager:
        return self._task.packager(self.config, self.data)

    @property
    def is_compared_with_base(self) -> bool:
        """Whether the loss itself compares the model with model.base."""
        return self._task.reference

    @cached_property
    def _task(self) -> Task:
        return load_task(self.config.data.task)


def task_code(name: str) -> str:
    """Return the digest of the code of another package's task; "" for a built-in task."""
    ours = plugins.is_ours(plugins.TASKS, name)
    return "" if ours else users_code_digest(plugins.address(plugins.TASKS, name) or name)


def _imported(name: str) -> object:
    remedy = f"use {_known()}, or module:NAME of a task that can be imported"
    _reach_current_folder()
    with foreign(f"data.task = {name!r} cannot be used", remedy, runs_code=True):
        return EntryPoint("task", name, plugins.TASKS).load()


def _reach_current_folder() -> None:
    """Make modules in the current folder importable, as `python -m` does.

    They come last, so that a file there never hides a package.
    """
    with contextlib.suppress(FileNotFoundError):
        here = str(Path.cwd())
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)


def _known() -> str:
    return f"one of {', '.join(plugins.names(plugins.TASKS))}"
