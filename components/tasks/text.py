"""What training for text tasks shares: a tokenizer, and whether a model drops anything."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import torch

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.tasks.base import Row
from steadytrain.components.tasks.encoding.tokens import load_tokenizer


class TextTraining:
    """Training of a Transformers model on rows of tokens.

    task: the built-in task whose other parts go with it. So a subclass is enough for `data.task`.
    auto: Transformers' class that loads the model.
    """

    task: str
    auto: str
    metric = "loss"
    greater_is_better = False

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.data.path(self.data.tokenizer))

    @property
    def pad_token_id(self) -> int:
        """Return the padding token.

        If there is none, any token works, because padding is masked.
        """
        padding: int | None = self.tokenizer.pad_token_id
        return (self.tokenizer.eos_token_id or 0) if padding is None else padding

    def cost(self, row: Row) -> int:
        return len(row["input_ids"])

    def build_model(self) -> torch.nn.Module:
        raise NotImplementedError

    def load_reference(self, address: str, field: str) -> torch.nn.Module:
        import transformers

        from steadytrain.components.tasks.models import load_frozen

        auto = getattr(transformers, self.auto)
        return load_frozen(auto, address, field, self.config, self.data, self.tokenizer)

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        del model
        return ()


R_DROP: Final = "training.r_drop.weight"


def check_drops(model: torch.nn.Module, field: str, value: object) -> None:
    """Check that two passes of a model differ by their dropout.

    Args:
        field, value: what needs the dropout.

    Raises:
        BadInput: the model has no dropout.
    """
    if not drops(model):
        raise BadInput(
            f"{field} = {value}: the model has no dropout, so both passes would be equal",
            remedy="set model.dropout, or leave it out",
        )


def drops(model: torch.nn.Module) -> bool:
    """Return whether any part of a model drops anything."""
    return any(_drops(module) for module in model.modules())


def _drops(module: torch.nn.Module) -> bool:
    """Return whether it is a dropout layer, or attention with a share of dropout of its own."""
    share: Any = module.p if isinstance(module, torch.nn.Dropout) else 0.0
    own: Any = getattr(module, "attention_dropout", 0.0)
    return share > 0 or (isinstance(own, float) and own > 0)
