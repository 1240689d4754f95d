"""The shape of a model without a formula: built by Transformers, without weights."""

from __future__ import annotations

import functools
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    __version__,
)
from transformers.pytorch_utils import Conv1D

from steadytrain.components.memory.groups import Group, count, grouped, layers_of, still_layers
from steadytrain.components.memory.random_model import LAYER_COUNTS, fake_mode, random_model
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import Matrix, Shape
from steadytrain.components.memory.trace import Traced
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.plain import shown
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.tasks.document_attention import Documents
from steadytrain.components.tasks.documents import pass_documents, unlike
from steadytrain.components.tasks.fused_head import FusedHead
from steadytrain.components.techniques.inference import eval_mode
from steadytrain.components.techniques.multi_task.uncertainty import attach_uncertainty

_MOST_LAYERS: Final = 2000
_NO_END: Final = 10**9
"""Positions of a model whose configuration has no limit."""
_ASKED: Final = (6, 5)
"""Lengths in tokens of the documents used to probe attention."""


def traced_shape(architecture: Mapping[str, Any], labels: int = 0) -> Shape:
    """Return sizes from the modules, and activations from passes over fake tensors.

    Code that comes with a model is never run.

    Args:
        architecture: Transformers' configuration of the model, including `model_type`.
        labels: classes of a classification head; 0 for a language model's head.

    Raises:
        BadInput: Transformers can't build it.
    """
    family = str(architecture.get("model_type", ""))
    _refuse_what_there_is_not(family, labels)
    _refuse_endless_layers(architecture)
    with foreign(
        f"model_type = {family!r}: the plan has no formula for it, and it cannot be traced",
        "change the named field, or try a few training steps",
    ):
        return _shape(json.dumps(architecture, sort_keys=True), labels)


def traced_groups(
    config: RunConfig, architecture: Mapping[str, Any], labels: int
) -> Sequence[Group]:
    """Return the parameter groups of a configured model.

    Args:
        architecture, labels: as for `traced_shape`.

    Raises:
        BadInput: they do not fit the model, or Transformers can't build it.
    """
    return grouped(_without_memory(config, architecture, labels), config.training)


def traced_still(config: RunConfig, architecture: Mapping[str, Any], labels: int) -> int:
    """Return how many layers of a configured model, from the first one, have no backward pass.

    Args, Raises: as for `traced_groups`.
    """
    return still_layers(_without_memory(config, architecture, labels), config.training)


def _without_memory(
    config: RunConfig, architecture: Mapping[str, Any], labels: int
) -> torch.nn.Module:
    """Build a configured model whose parameters have no memory."""
    _refuse_what_there_is_not(str(architecture.get("model_type", "")), labels)
    setting = Setting(length=sum(_ASKED), adapter=config.model.adapter)
    with warnings.catch_warnings(action="ignore"), torch.device("meta"):
        model = random_model(architecture, setting, labels)
        if config.training.multi_task.learns_weights:
            attach_uncertainty(model, len(config.data.parts))
        return model


def _refuse_what_there_is_not(family: str, labels: int) -> None:
    if family not in CONFIG_MAPPING:
        raise BadInput(
            f"model_type = {shown(family)}: Transformers {__version__} has no such architecture",
            remedy="check its spelling; a plan never runs code that comes with a model",
        )
    auto = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    if CONFIG_MAPPING[family] not in auto._model_mapping:
        what, other = "causal language model", "sequence_classification"
        if labels:
            what, other = "sequence classification", "causal_lm"
        raise BadInput(
            f"model_type = {family!r}: Transformers {__version__} has no {what} for it",
            remedy=f"set data.task={other}, or use another model",
        )


def _refuse_endless_layers(architecture: Mapping[str, Any]) -> None:
    """Reject absurd layer counts: building a layer takes a millisecond, so real models are fine."""
    for name in LAYER_COUNTS:
        layers = architecture.get(name)
        if isinstance(layers, int) and layers > _MOST_LAYERS:
            raise BadInput(
                f"{name} = {layers:,}: a plan supports at most {_MOST_LAYERS:,} layers",
                remedy="correct it in the model's configuration",
            )


@functools.lru_cache(maxsize=8)
def _shape(text: str, labels: int) -> Shape:
    architecture = json.loads(text)
    with warnings.catch_warnings(action="ignore"), fake_mode():
        with torch.device("meta"):
            model: Any = random_model(architecture, Setting(length=sum(_ASKED)), labels)
        return _described(model, architecture, labels)


def _described(model: Any, architecture: Mapping[str, Any], labels: int) -> Shape:
    config, layers = model.config.get_text_config(), layers_of(model)
    table = model.get_input_embeddings().weight
    head = None if labels else model.get_output_embeddings()
    tied = head is not None and head.weight is table
    heads = _number(config, "num_attention_heads", 1)
    width = _number(config, "head_dim", table.shape[1] // heads)
    matrices, experts = _matrices(layers), _experts(layers[0])
    in_layers = sum(count(layer) for layer in layers) // len(layers)
    embeddings = _embeddings(model, layers)
    used = sum(experts) * _number(config, "num_experts_per_tok", 1)
    known = sum(matrix.size for matrix in matrices) + sum(experts)
    return Shape(
        family=str(architecture.get("model_type")),
        hidden=table.shape[1],
        layers=len(layers),
        heads=heads,
        attention=heads * width,
        key_value=_number(config, "num_key_value_heads", heads) * width,
        intermediate=max(max(matrix.inputs, matrix.outputs) for matrix in matrices),
        vocabulary=table.shape[0],
        positions=_number(config, "max_position_embeddings", _NO_END),
        tied=tied,
        labels=labels,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        matrices=matrices,
        vectors=in_layers - known,
        embeddings=embeddings,
        head=count(model) - len(layers) * in_layers - embeddings,
        experts=experts,
        used=used // _experts_count(layers[0]),
        fused=labels > 0 or isinstance(head, FusedHead),
        documents=labels == 0 and _hears_of_documents(model),
        traced=Traced(architecture, len(layers), labels),
    )


def _number(config: Any, name: str, default: int) -> int:
    """Return a size; if it differs by layer, the largest one."""
    value = getattr(config, name, None)
    if isinstance(value, list) and value:
        value = max(value)
    return value if isinstance(value, int) and value > 0 else default


def _linear(layer: torch.nn.Module) -> Iterator[Matrix]:
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield Matrix(name, module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            yield Matrix(name, *module.weight.shape)


def _matrices(layers: Any) -> tuple[Matrix, ...]:
    """Return the matrices of the most frequent kind of layer."""
    kinds = Counter(tuple(_linear(layer)) for layer in layers)
    return kinds.most_common(1)[0][0]


def _stacks(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the tensors that hold the weights of all experts."""
    return [parameter for parameter in layer.parameters() if parameter.dim() == 3]


def _experts(layer: torch.nn.Module) -> tuple[int, ...]:
    return tuple(parameter.numel() for parameter in _stacks(layer))


def _experts_count(layer: torch.nn.Module) -> int:
    return max((len(parameter) for parameter in _stacks(layer)), default=1)


def _embeddings(model: torch.nn.Module, layers: Any) -> int:
    """Return the values of all tables outside the layers."""
    within = {module for layer in layers for module in layer.modules()}
    tables = {
        module.weight
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and module not in within
    }
    return sum(table.numel() for table in tables)


def _hears_of_documents(model: Any) -> bool:
    """Return whether a packed row's documents reach the attention. A run checks its outputs."""
    ids = torch.zeros((1, sum(_ASKED)), dtype=torch.int64, device="meta")
    documents = Documents(list(_ASKED))
    try:
        with eval_mode(model), pass_documents(documents) as extra:
            model(input_ids=ids, position_ids=ids, use_cache=False, **extra)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    return not unlike(documents)
