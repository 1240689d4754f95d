"""Score a language model on pairs of answers, of which one is preferred."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Components
from steadytrain.components.tasks.encoding.long_records import truncated
from steadytrain.components.tasks.encoding.preference import encode_pair
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.models import load_frozen
from steadytrain.components.tasks.scoring.language import document_losses
from steadytrain.components.tasks.scoring.table import longest, padding_id, score_table


class PreferenceScorer:
    """Scores a model against the run's base model, in 32 bits. A champion has the same reference.

    The column `margin` is the difference of the rewards: above 0, the preferred answer won.
    """

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data

    @cached_property
    def reference(self) -> Components:
        """The model that rewards are relative to, with its tokenizer."""
        from transformers import AutoModelForCausalLM

        tokenizer = load_tokenizer(self.data.path(self.data.tokenizer))
        base = self.config.model.base
        model = load_frozen(
            AutoModelForCausalLM,
            base,
            "model.base",
            self.config,
            self.data,
            tokenizer,
            dtype=torch.float32,
        )
        return {"model": model, "tokenizer": tokenizer}

    def score(self, components: Components, records: pa.Table) -> pa.Table:
        device = next(components["model"].parameters()).device
        self.reference["model"].to(device)
        pairs: list[Any] = records.column("pair").to_pylist()
        gained = self._losses(self.reference, pairs) - self._losses(components, pairs)
        margin = self.config.training.dpo.beta * (gained[0::2] - gained[1::2])
        return score_table(
            records,
            {
                "loss": np.logaddexp(0, -margin),
                "targets": np.ones(len(margin), dtype=np.int64),
                "bytes": np.zeros(len(margin), dtype=np.int64),
                "margin": margin,
            },
        )

    def _losses(self, components: Components, pairs: Sequence[str]) -> npt.NDArray[np.float64]:
        """Return the loss of each document in nats, two of each pair."""
        model, tokenizer = components["model"], components["tokenizer"]
        length = longest(model, self.data.sequence_length)
        documents = [
            truncated(document, length)
            for pair in pairs
            for document in encode_pair(tokenizer, pair)
        ]
        found = document_losses(
            model.eval(),
            documents,
            batch_size=self.config.evaluation.batch_size,
            length=length,
            fill=padding_id(tokenizer),
        )
        return np.array(found)

    def score_baseline(self, records: pa.Table) -> pa.Table | None:
        """Score the reference model itself: all margins are 0, which prefers neither answer."""
        count = records.num_rows
        values = {
            "loss": np.full(count, math.log(2)),
            "targets": np.ones(count, dtype=np.int64),
            "bytes": np.zeros(count, dtype=np.int64),
        }
        return score_table(records, values) if count else None
