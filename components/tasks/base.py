"""What varies by kind of task, behind one object.

The loop, the gate and the registry know nothing else about a task: no
tokenizer, no text. A task of a user's own is named `module:Class` in `data.task`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord

if TYPE_CHECKING:
    # A step whose work is done already imports tasks as well, and never computes.
    import torch

Row = Mapping[str, Any]
"""A row of a prepared shard, as plain Python and NumPy values."""

Batch = dict[str, "torch.Tensor"]
"""Tensors of one micro-batch; the loop moves them to the device."""

Components = Mapping[str, Any]
"""A loaded model for judging: "model", and what goes with it (a tokenizer, a processor)."""


@dataclass(frozen=True)
class LossSum:
    """Loss of a micro-batch before it is divided.

    total: scalar, float32, differentiable: sum over the targets.
    """

    total: torch.Tensor


class Task(Protocol):
    """One kind of task. Constructed with `(config, data)`.

    metric: validation score that chooses the best model, for example "loss".
    greater_is_better: its direction.
    padded: column whose lists a micro-batch pads to its longest: rows of about equal length then
        come together. A task of a user's own may do without; empty: nothing is padded.
    """

    metric: str
    greater_is_better: bool

    def __init__(self, config: RunConfig, data: DataRecord) -> None: ...

    def build_model(self) -> torch.nn.Module:
        """The model to train: loaded, or from scratch (initialised from torch's global RNG).

        Raises:
            BadInput: the base cannot be used with this data (no weights, another
                vocabulary, sequences longer than the model's positions).
        """

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        """Makes the model ready for `loss`, adapters included, before ranks share it.

        A task of a user's own may do without.

        Returns:
            What is slower than it could be and why, a sentence each.
        """

    def cost(self, row: Row) -> int:
        """Tokens (or other units of work) of a row: the unit of throughput."""

    def collate(self, rows: Sequence[Row]) -> Batch:
        """A micro-batch of rows."""

    def weight(self, batch: Batch) -> int:
        """Targets of a micro-batch: what the global batch's loss is divided by."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        """Forward pass and summed loss."""

    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        """Sums over a micro-batch that add up over batches and ranks.

        Always holds "loss" (summed) and "weight" (targets).
        """

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the whole validation side from the added sums."""

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        """Writes the model as a plain folder that `load_exported` and its own library read."""

    def load_exported(self, folder: Path) -> Components:
        """Loads an exported folder for judging."""

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        """Scores each raw record of the test side.

        Returns:
            A row a record, in order: `id` (string), `group`, `slice` (string or null),
            `loss` (float64, nats, summed over the record's targets), `targets` (int64),
            `bytes` (int64, UTF-8 bytes of the text that is scored; 0 where there is no
            text), and for classes `label`, `prediction` (int64) and `probabilities`
            (list<float32>, classes).
        """

    def baselines(self, records: pa.Table) -> dict[str, float]:
        """What a trivial model reaches on the records, by metric (such as the unigram loss)."""

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:
        """Logs an exported model to the active MLflow run, with signature and input example.

        Returns:
            Its model URI.
        """

    def load_logged(self, model_uri: str) -> Components:
        """Loads a logged or registered model for judging."""
