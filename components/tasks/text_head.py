"""What training a head on whole texts shares, whatever its targets are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from steadytrain.components.shared.arrow_files import TEXT
from steadytrain.components.tasks.base import Batch, Row
from steadytrain.components.tasks.encoding.labeled_text import TYPES
from steadytrain.components.tasks.models import build
from steadytrain.components.tasks.scoring.table import token_types
from steadytrain.components.tasks.text import TextTraining
from steadytrain.components.techniques.text_augmentation.changes import augmented, generator_of


class TextHead(TextTraining):
    """Training of Transformers' sequence classifiers, of which regressors are one kind.

    Rows have `input_ids` (int32) and `label`, as `TargetedTextEncoder.target` says; those of pairs
    also `token_type_ids`. It offers the model (`build_headed`), the text of each row, which may be
    augmented (`draw`), the weight of a micro-batch, and the models that rows are compared with
    (`load_reference`). With them come `padded_inputs`, `head_output` and `head_logits`.

    A subclass adds `build_model`, `collate` with the `targets`, a tensor with one row for each row
    of the micro-batch, the losses and the validation metrics.
    """

    auto = "AutoModelForSequenceClassification"
    padded = "input_ids"

    def build_headed(self, labels: Sequence[str], problem_type: str) -> torch.nn.Module:
        """Return the model with a head for the labels; its rows may be those of model.base.

        Args:
            problem_type: the kind of target, as Transformers names it.
        """
        from transformers import AutoModelForSequenceClassification

        return build(
            AutoModelForSequenceClassification,
            self.config,
            self.data,
            self.tokenizer,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            problem_type=problem_type,
            # Decoders use it to find the last token of a text.
            pad_token_id=self.pad_token_id,
        )

    def load_reference(self, address: str, field: str) -> torch.nn.Module:
        model = super().load_reference(address, field)
        # With another padding token than the batches, decoders would read a padded place.
        model.config.pad_token_id = self.pad_token_id  # type: ignore[union-attr]
        return model

    def draw(self, row: Row, place: int, *, training: bool) -> Row:
        """Return the row with the tokens of an augmented text, which depends on the place alone."""
        config = self.config.training
        if not (training and config.augmentation.on):
            return row
        random = generator_of(config.seed, f"augmentation {place}")
        text = augmented(row[TEXT], config.augmentation, random)
        ids = self._tokens(text) if text != row[TEXT] else ()
        return {**row, "input_ids": ids} if len(ids) else row

    def _tokens(self, text: str) -> Sequence[int]:
        """Return a text's tokens, as preprocessing does."""
        encoded = self.tokenizer(
            text, truncation=True, max_length=self.data.sequence_length, verbose=False
        )
        ids: list[int] = encoded["input_ids"]
        return ids

    def weight(self, batch: Batch) -> int:
        return len(batch["targets"])


def padded_inputs(rows: Sequence[Row], pad_token_id: int) -> Batch:
    """Return the inputs of a micro-batch of rows, padded to the longest."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.full((len(rows), longest), pad_token_id)
    mask = torch.zeros((len(rows), longest), dtype=torch.int64)
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[index, :length] = torch.from_numpy(np.asarray(row["input_ids"], dtype=np.int64))
        mask[index, :length] = 1
    batch = {"input_ids": ids, "attention_mask": mask}
    if TYPES in rows[0]:
        batch |= token_types([row[TYPES] for row in rows], longest)
    return batch


def head_output(model: torch.nn.Module, batch: Batch, *, states: bool = False) -> Any:
    """Return what Transformers' model returns for a micro-batch.

    Args:
        states: whether that includes the states of all layers.
    """
    extra = {"output_hidden_states": True} if states else {}
    names = ("input_ids", "attention_mask", TYPES)
    inputs = {name: batch[name] for name in names if name in batch}
    return model(**inputs, **extra)


def head_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the outputs (rows, labels) of the head for a micro-batch, float32."""
    logits: torch.Tensor = head_output(model, batch).logits.float()
    return logits
