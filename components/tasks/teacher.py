"""The teacher of a distillation: a frozen model next to the one that trains.

It is no part of the trained model, so checkpoints, exports, gradients and sharding never see it.
Each rank has it complete, in the precision of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from steadytrain.components.shared.config import DistillationConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import Batch
from steadytrain.components.tasks.distillation import Teaching
from steadytrain.components.tasks.loss_request import request_states

FIELD = "training.distillation.teacher"
Forward = Callable[[torch.nn.Module, Batch], torch.Tensor]
"""Returns a model's logits of a micro-batch, (..., classes or vocabulary)."""


class Teacher:
    """Answers with logits.

    Args:
        model: frozen, in evaluation mode. If its head is fused, no logits of a complete micro-batch
            are computed.
    """

    def __init__(self, model: torch.nn.Module, settings: DistillationConfig) -> None:
        self.model, self.settings = model, settings

    @torch.no_grad()
    def teach(self, forward: Forward, batch: Batch) -> Teaching:
        """Return what the teacher says about a micro-batch."""
        device = batch["targets"].device
        if next(self.model.parameters()).device != device:
            self.model.to(device)
        with request_states() as request:
            given = forward(self.model, batch)
        if request.hidden is None:
            logits = given.flatten(0, -2)
            return Teaching(lambda rows: logits[rows], self.settings)
        hidden, weight, bias = request.hidden.flatten(0, -2), request.weight, request.bias

        def logits_of(rows: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
                return torch.nn.functional.linear(hidden[rows], weight, bias)

        return Teaching(logits_of, self.settings)


def check_vocabulary(teacher: Any, student: Any, address: str | None) -> None:
    """Check that two language models have equally many tokens.

    Raises:
        BadInput: they do not.
    """
    theirs, ours = (model.get_input_embeddings().num_embeddings for model in (teacher, student))
    if theirs != ours:
        raise BadInput(
            f"{FIELD} = {address!r}: it has {theirs} tokens, and the student {ours}",
            remedy="use a teacher and a student with the same vocabulary, such as two sizes of one "
            "family of models",
        )


def check_labels(teacher: Any, labels: list[str], address: str | None) -> None:
    """Check that a classifier has the labels of the data, in the same order.

    Raises:
        BadInput: it does not.
    """
    names = teacher.config.id2label
    theirs = [names.get(index) for index in range(teacher.config.num_labels)]
    if theirs != labels:
        raise BadInput(
            f"{FIELD} = {address!r}: its labels are {', '.join(map(str, theirs))}, and the data's "
            f"are {', '.join(labels)}",
            remedy="train the teacher on these labels, or name them in its order in data.labels",
        )
