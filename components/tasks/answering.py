"""A teacher that answers whole rows, before training begins, so that its answers can be stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import Batch, Row
from steadytrain.components.tasks.chunks import comparison_rows
from steadytrain.components.tasks.device import to_device
from steadytrain.components.tasks.packing import IGNORED
from steadytrain.components.tasks.stored_answers import COLUMNS, top_answers
from steadytrain.components.tasks.teacher import Forward, Teacher


class AnsweringTeacher:
    """Answers rows.

    Args:
        collate: makes a micro-batch of rows. Its targets are in the order of the rows.
        outputs: number of tokens or labels.

    Raises:
        BadInput: there are fewer of them than are to be stored.
    """

    def __init__(
        self,
        teacher: Teacher,
        forward: Forward,
        collate: Callable[[Sequence[Row]], Batch],
        outputs: int,
    ) -> None:
        top_k = teacher.settings.top_k
        assert top_k is not None, "answers are stored"
        if top_k > outputs:
            raise BadInput(
                f"training.distillation.top_k = {top_k}: the teacher has {outputs} to choose from",
                remedy=f"set it to {outputs} or less",
            )
        self.teacher, self.forward, self.collate = teacher, forward, collate
        self.top_k, self.block = top_k, comparison_rows(outputs)

    @torch.no_grad()
    def answer(self, rows: Sequence[Row], device: torch.device) -> list[Row]:
        """Return the answers of each row, as flat lists."""
        counts = [len(_places(self.collate([row]))) for row in rows]
        batch = to_device(self.collate(rows), device)
        teaching, places, found = self.teacher.teach(self.forward, batch), _places(batch), []
        for start in range(0, max(len(places), 1), self.block):
            logits = teaching.logits(places[start : start + self.block])
            assert isinstance(logits, torch.Tensor), "this teacher is a model"
            top = top_answers(logits, self.top_k, self.teacher.settings.temperature)
            found.append((top.classes.int(), top.likely, top.rest))
        whole = [torch.cat(part).cpu().numpy() for part in zip(*found, strict=True)]
        return [
            {
                name: part[end - count : end].ravel()
                for name, part in zip(COLUMNS, whole, strict=True)
            }
            for count, end in zip(counts, accumulate(counts), strict=True)
        ]


def _places(batch: Batch) -> torch.Tensor:
    """Return where a micro-batch has targets."""
    targets: torch.Tensor = batch["targets"].flatten()
    return (targets != IGNORED).nonzero().squeeze(1)
