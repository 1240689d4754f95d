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
    frozen = setting.adapter.freezes
    half = _HALF.get(setting.precision, torch.float32)
    module = plain_model(architecture, labels, half if frozen else torch.float32)
    module = attach(module, setting.adapter) if frozen else module
    if not labels:
        fuse_head(module)
        if not setting.masked:
            vocabulary = _config(architecture, labels).get_text_config().vocab_size
            attend_by_document(module, int(vocabulary))
    return module


def plain_model(
    architecture: Mapping[str, Any], labels: int = 0, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """Build it as Transformers loads an exported model.

    Args:
        architecture, labels: as for `random_model`.
    """
    auto = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    module: torch.nn.Module = auto.from_config(
        _config(architecture, labels), dtype=dtype, trust_remote_code=False
    )
    return module


def _config(architecture: Mapping[str, Any], labels: int) -> Any:
    fields = {**architecture, **_SPECIAL}
    if labels:
        fields["num_labels"] = labels
    return AutoConfig.for_model(**fields)


def loss_of(labels: int) -> Callable[[torch.nn.Module, Batch], torch.Tensor]:
    """Return the function that sums a micro-batch's loss, as in the built-in tasks.

    Args:
        labels: as for `random_model`.
    """
    return class_loss if labels else next_token_loss
