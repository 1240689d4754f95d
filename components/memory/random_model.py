"""A model built from its architecture alone, for trial runs: with random weights, or of fakes.

Operators run on fake tensors, but nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from steadytrain.components.memory.setting import Setting
from steadytrain.components.tasks.base import Batch
from steadytrain.components.tasks.causal_lm import next_token_loss
from steadytrain.components.tasks.documents import attend_by_document
from steadytrain.components.tasks.frozen_parts import attach
from steadytrain.components.tasks.fused_head import fuse_head
from steadytrain.components.tasks.sequence_classification import class_loss

LAYER_COUNTS: Final = ("n_layer", "n_layers", "num_layers", "num_hidden_layers")
"""Names that configurations use for their number of layers."""

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


def with_layers(architecture: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the configuration with fewer layers, and shorten its per-layer lists to match."""
    field = next((name for name in LAYER_COUNTS if name in architecture), "num_hidden_layers")
    count = architecture.get(field)
    kept: dict[str, Any] = {}
    for name, value in architecture.items():
        if isinstance(value, list) and len(value) == count:
            kept[name] = value[:layers]
        elif name == "text_config" and isinstance(value, Mapping):
            kept[name] = with_layers(value, layers)
        elif name != "layer_types":
            kept[name] = value
    return {**kept, field: layers}


@dataclass(frozen=True)
class Sample:
    """Two numbers of layers that show how a model's memory grows with its layers.

    The kinds of layers repeat after `period` layers, from layer `first` on. `layers` is how many
    the whole model has. Both samples end with the same kind of layer as the whole model.
    """

    layers: int
    first: int
    period: int
    few: int

    @property
    def more(self) -> int:
        return self.few + self.period

    def is_outer(self, place: int, layers: int) -> tuple[bool, bool]:
        """Return whether a layer is among the first ones, and among the last ones.

        Every kind of layer is among both. One more layer is, since the outermost has one neighbor.
        """
        return place <= self.first + self.period, place >= layers - 1 - self.period


def sample_layers(architecture: Mapping[str, Any], labels: int = 0) -> Sample | None:
    """Return which numbers of layers stand for the whole model; None if only all of them do.

    Args:
        architecture, labels: as for `random_model`.
    """
    layers = layers_in(architecture, labels)
    with torch.device("meta"):
        whole = plain_model(architecture, labels)
        found = _sample(_kinds(_described(whole, layers)), layers)
        if found is None:
            return None
        part = plain_model(with_layers(architecture, found.more), labels)
    kept, described = _described(part, found.more), _described(whole, layers)
    left_out = {
        parameter
        for stack in stacks_of(whole, layers)
        for layer in stack[found.more :]
        for parameter in layer.parameters()
    }
    sizes = sum(item.numel() for item in whole.parameters() if item not in left_out)
    same = sizes == sum(item.numel() for item in part.parameters())
    return found if same and kept == described[: found.more] else None


def layers_in(architecture: Mapping[str, Any], labels: int = 0) -> int:
    """Return the number of layers that a configuration asks for; 0 if it does not say."""
    layers = getattr(_config(architecture, labels).get_text_config(), "num_hidden_layers", 0)
    return layers if isinstance(layers, int) else 0


def stacks_of(model: torch.nn.Module, layers: int) -> list[torch.nn.ModuleList]:
    """Return the lists of that many layers that no other such list contains."""
    found: dict[str, torch.nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, torch.nn.ModuleList) and 0 < len(module) == layers and not inside:
            found[name] = module
    return list(found.values())


def _described(model: torch.nn.Module, layers: int) -> list[dict[tuple[Any, ...], Any]]:
    """Return what each layer consists of: its modules, their sizes and their settings."""
    found: list[dict[tuple[Any, ...], Any]] = [{} for _ in range(layers)]
    for number, stack in enumerate(stacks_of(model, layers)):
        for place, layer in enumerate(stack):
            for name, module in layer.named_modules():
                key = (number, name)
                shapes = {key: item.shape for key, item in module.named_parameters(recurse=False)}
                found[place][key] = (type(module), module.extra_repr(), shapes)
                for field, value in vars(module).items():
                    if isinstance(value, int | str):
                        found[place][*key, field] = value
    return found


def _kinds(layers: Sequence[Mapping[Any, Any]]) -> list[Mapping[Any, Any]]:
    """Return the layers without what counts them."""
    last = layers[-1] if layers else {}
    numbers = {
        key
        for key, value in last.items()
        if value == len(layers) - 1
        and all(layer.get(key) == place for place, layer in enumerate(layers))
    }
    return [{key: value for key, value in layer.items() if key not in numbers} for layer in layers]


def _sample(kinds: Sequence[Any], layers: int) -> Sample | None:
    """Return the smallest sample of a sequence of kinds; None if it would not be smaller."""
    found = [each for period in range(1, layers) for each in _samples(kinds, layers, period)]
    least = min(found, key=lambda each: each.few + each.more, default=None)
    known = any(kinds) and least is not None and least.few + least.more < layers
    return least if known else None


def _samples(kinds: Sequence[Any], layers: int, period: int) -> Iterator[Sample]:
    first = layers - period
    while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
        first -= 1
    few = first + period + 2
    few += (layers - few) % period
    yield Sample(layers, first, period, few)


def fake_mode() -> FakeTensorMode:
    """Return a mode in which new tensors are fakes."""
    # PEFT copies a classifier's new head, and with its fakes the mode that they belong to.
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake(model: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace tensors on the meta device with fakes; tied tensors stay tied.

    Args:
        dtype: of the floating-point ones; None keeps theirs. Fakes can't be converted later.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    wanted = dtype if tensor.is_floating_point() else None
                    fake = torch.empty_like(tensor, device="cpu", dtype=wanted)
                    if isinstance(tensor, torch.nn.Parameter):
                        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                held[name] = made[id(tensor)]  # type: ignore[assignment]


def batch_of(setting: Setting, labels: int) -> Batch:
    """Return a micro-batch as the tasks' `collate` does."""
    rows, length = setting.micro_batch, setting.length
    # Packed documents share one row.
    shape = (rows, length) if setting.masked else (1, rows * length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    if labels:
        targets = torch.zeros(setting.micro_batch, dtype=torch.int64)
        return {"input_ids": tokens, "attention_mask": tokens.clone(), "targets": targets}
    return {"input_ids": tokens, "position_ids": tokens.clone(), "targets": tokens.clone()}
