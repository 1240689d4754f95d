"""A model by its architecture alone, its weights drawn at random: to try things out on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from steadytrain.components.tasks.base import Batch
from steadytrain.components.tasks.causal_lm import next_token_loss
from steadytrain.components.tasks.documents import attend_by_document
from steadytrain.components.tasks.fused_head import fuse_head
from steadytrain.components.tasks.sequence_classification import class_loss
from steadytrain.components.train.loop.adapter import attach
from steadytrain.components.train.plan.setting import Setting

_SPECIAL: Final = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
_HALF: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


def random_model(
    architecture: Mapping[str, Any], setting: Setting, labels: int = 0
) -> torch.nn.Module:
    """As training would have it: adapters, the head's loss, attention by document.

    Args:
        architecture: Transformers' configuration.
        labels: classes of a classification head; 0: a language model's head.

    Raises:
        BadInput: adapters go to layers that it does not have.
    """
    fields, frozen = {**architecture, **_SPECIAL}, setting.adapter.freezes
    if labels:
        fields["num_labels"] = labels
    auto = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    module: torch.nn.Module = auto.from_config(
        AutoConfig.for_model(**fields),
        dtype=_HALF.get(setting.precision, torch.float32) if frozen else torch.float32,
        trust_remote_code=False,
    )
    module = attach(module, setting.adapter) if frozen else module
    if not labels:
        fuse_head(module)
        if not setting.masked:
            attend_by_document(module, int(fields["vocab_size"]))
    return module


def loss_of(labels: int) -> Callable[[torch.nn.Module, Batch], torch.Tensor]:
    """Summed loss of a micro-batch, as the built-in tasks have it.

    Args:
        labels: as for `random_model`.
    """
    return class_loss if labels else next_token_loss
