"""A model built from its architecture alone, with random weights, for trial runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from steadytrain.components.memory.setting import Setting
from steadytrain.components.tasks.adapter import attach
from steadytrain.components.tasks.base import Batch
from steadytrain.components.tasks.causal_lm import next_token_loss
from steadytrain.components.tasks.documents import attend_by_document
from steadytrain.components.tasks.fused_head import fuse_head
from steadytrain.components.tasks.sequence_classification import class_loss

_SPECIAL: Final = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
_HALF: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


def random_model(
    architecture: Mapping[str, Any], setting: Setting, labels: int = 0
) -> torch.nn.Module:
    """Build it as training would: adapters, the head's loss, attention by document.

    Args:
        architecture: Transformers' configuration.
        labels: classes of a classification head; 0 for a language model's head.

    Raises:
        BadInput: adapters target layers that the model doesn't have.
    """
    fields, frozen = {**architecture, **_SPECIAL}, setting.adapter.freezes
    if labels:
        fields["num_labels"] = labels
    auto = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    config = AutoConfig.for_model(**fields)
    module: torch.nn.Module = auto.from_config(
        config,
        dtype=_HALF.get(setting.precision, torch.float32) if frozen else torch.float32,
        trust_remote_code=False,
    )
    module = attach(module, setting.adapter) if frozen else module
    if not labels:
        fuse_head(module)
        if not setting.masked:
            vocabulary = config.get_text_config().vocab_size
            attend_by_document(module, int(vocabulary))
    return module


def loss_of(labels: int) -> Callable[[torch.nn.Module, Batch], torch.Tensor]:
    """Return the function that sums a micro-batch's loss, as in the built-in tasks.

    Args:
        labels: as for `random_model`.
    """
    return class_loss if labels else next_token_loss
