"""What a model's forward and backward keep, measured in a pass over fake tensors.

For architectures without a formula: hooks on the layers record how much is alive when each one
starts and ends. The peak formula uses these numbers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from transformers import AutoConfig

from steadytrain.components.memory.groups import layers_of
from steadytrain.components.memory.live_tensors import LiveTensors, first_tensor
from steadytrain.components.memory.random_model import (
    batch_of,
    fake,
    fake_mode,
    loss_of,
    random_model,
    with_layers,
)
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import Activations, LayerMemory
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.tasks.base import Batch
from steadytrain.components.tasks.fused_head import FusedHead, LossRequest, head_request

_LAYERS: Final = 12
"""Maximum number of traced layers. Patterns within a model, such as kinds of attention, repeat
within fewer layers."""
_SIZES: Final = (1, 8, 64)
"""Traced micro-batches; between two of them, memory grows linearly."""
_COPIES: Final = "copies"


@dataclass(frozen=True)
class Readings:
    """Bytes of one micro-batch.

    entry: a layer's input.
    outside: what the embeddings keep in addition to the first layer's input.
    kept: by a layer, on average.
    exit: what the last norm keeps, and the gradient of the head's input.
    loss: what a plain loss adds to what is kept, including the head's gradient.
    backward: the most that a layer's backward adds, besides the incoming gradient and two thirds of
        its weights' gradients.
    """

    entry: float
    outside: float
    kept: float
    exit: float
    loss: float
    backward: float

    def towards(self, other: Readings, share: float) -> Readings:
        """Interpolate linearly; 0 returns this one, 1 the other."""
        ends = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Readings(*(first + (second - first) * share for first, second in ends))

    def as_activations(self) -> Activations:
        """Convert to the input of the peak formula; the layer is not split into halves."""
        layer = LayerMemory(
            entry=int(self.entry),
            attention=int(self.kept),
            feed_forward=0,
            attention_backward=int(self.backward),
            feed_forward_backward=int(self.backward),
        )
        return Activations(layer, int(self.outside), int(self.exit), int(self.loss))


class Traced:
    """An architecture's activations by setting; each kind of pass is traced once."""

    def __init__(self, architecture: Mapping[str, Any], layers: int, labels: int) -> None:
        self.architecture = with_layers(architecture, min(layers, _LAYERS))
        self.labels = labels
        self.seen: dict[Setting, Readings] = {}

    def __call__(self, setting: Setting) -> Activations:
        """Return the activations of a micro-batch, on the line through the two nearest sizes."""
        size = setting.micro_batch * setting.copies
        above = next((each for each in _SIZES[1:] if size <= each), _SIZES[-1])
        below = _SIZES[_SIZES.index(above) - 1]
        if size in _SIZES:
            below = above = size
        few, many = (self._at(_as_traced(setting, each)) for each in (below, above))
        share = (size - below) / (above - below) if above > below else 0.0
        return few.towards(many, share).as_activations()

    def _at(self, setting: Setting) -> Readings:
        if setting not in self.seen:
            architecture = self.architecture
            if setting.cuda:
                architecture = _without_attention_dropout(architecture)
            with (
                foreign(
                    f"model_type = {architecture.get('model_type')!r}: a pass fails when the "
                    "plan traces it",
                    "check the model's configuration, or try a few training steps",
                ),
                warnings.catch_warnings(action="ignore"),
            ):
                self.seen[setting] = _trace(architecture, setting, self.labels)
        return self.seen[setting]


def _as_traced(setting: Setting, size: int) -> Setting:
    """Return only what a forward pass depends on; of strategies, only who casts the weights."""
    kind = "none" if setting.adapter.kind == "none" else "lora"
    return Setting(
        length=setting.length,
        micro_batch=size,
        precision="bf16" if setting.half else "fp32",
        masked=setting.masked,
        strategy="single" if setting.casts_weights or not setting.half else "fsdp",
        adapter=setting.adapter.model_copy(update={"kind": kind}),
        cuda=setting.cuda,
    )


def _without_attention_dropout(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Turn off attention dropout: the traced CPU kernels keep its mask, but a GPU's don't."""
    filled = AutoConfig.for_model(**architecture).to_dict()
    off = {
        name: 0.0
        for name, value in filled.items()
        if "att" in name and "drop" in name and isinstance(value, float)
    }
    return {**architecture, **off}


def _trace(architecture: Mapping[str, Any], setting: Setting, labels: int) -> Readings:
    with fake_mode():
        with torch.device("meta"):
            model = random_model(architecture, setting, labels)
        whole = setting.half and not setting.casts_weights and not setting.adapter.freezes
        fake(model, torch.bfloat16 if whole else None)
        batch = batch_of(setting, labels)
        watch = _Watch(model, setting, batch)
        if not setting.masked:
            batch["lengths"] = [setting.length] * setting.micro_batch
        model.train()
        with watch.live:
            with _autocast(setting):
                loss = loss_of(labels)(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        return watch.readings()


def _autocast(setting: Setting) -> contextlib.AbstractContextManager[Any]:
    casts = setting.half and (setting.casts_weights or setting.adapter.freezes)
    return torch.autocast("cpu", torch.bfloat16) if casts else contextlib.nullcontext()


class _Watch:
    """Records what is alive at the ends of layers, forward and backward."""

    def __init__(self, model: Any, setting: Setting, batch: Batch) -> None:
        layers = layers_of(model)
        shapes = {parameter.shape for parameter in model.parameters()}
        self.live = LiveTensors(lambda operator, tensor: _kind(operator, tensor, shapes))
        self.count = len(layers)
        gradient = setting.width if setting.strategy == "fsdp" else 4
        trained = sum(p.numel() for layer in layers for p in layer.parameters() if p.requires_grad)
        self.gradients = gradient * trained / self.count
        for tensor in (*model.parameters(), *model.buffers(), *batch.values()):
            self.live.see(tensor, "held")
        self.base = self.live.bytes
        self.entry = self.head_input = self.passed = 0
        self.began: float | None = None
        self.ended = self.before_loss = 0.0
        self.marks: list[float] = []
        self.peaks: list[float] = []
        for layer in layers:
            layer.register_forward_pre_hook(self._layer_begins, with_kwargs=True)
            layer.register_forward_hook(self._layer_ends)
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if head is None:
            model.register_forward_hook(lambda *_: self._forward_ends())
        elif isinstance(head, FusedHead):
            # The formula covers the memory of the loss within the head.
            head.forward = self._in_place_of_the_head
        else:
            head.register_forward_pre_hook(lambda *_: self._forward_ends())

    def readings(self) -> Readings:
        """Return the readings after forward and backward."""
        assert self.began is not None, "no layer of the model has run"
        self._mark()
        spans = list(zip(self.marks, self.peaks[1:], strict=False))[: self.passed]
        most = max(peak - mark for mark, peak in spans)
        exit_, loss = self.before_loss - self.ended + self.entry, 0.0
        if self.head_input:
            # The formula counts the head's input with the loss; here, its gradient counts.
            exit_ += self.entry - self.head_input
        else:
            loss = self.peaks[0] - self.copies - self.before_loss
        return Readings(
            entry=self.entry,
            outside=self.began - self.base - self.entry,
            kept=(self.ended - self.began) / self.count,
            exit=exit_,
            loss=loss,
            backward=most - self.gradients * 2 / 3,
        )

    def _now(self) -> float:
        """Return the live bytes without autocast's copies of weights, which the formula covers."""
        return self.live.bytes - self.live.held[_COPIES]

    def _layer_begins(self, _: Any, args: Sequence[Any], given: Mapping[str, Any]) -> None:
        if self.began is None:
            hidden = first_tensor((args, given))
            self.entry = hidden.numel() * hidden.element_size()
            self.began = self._now()
            self._mark_at(hidden)

    def _layer_ends(self, _: Any, __: Any, given: Any) -> None:
        self.ended = self._now()
        self.passed += 1
        self._mark_at(first_tensor(given))

    def _forward_ends(self) -> None:
        self.before_loss, self.copies = self._now(), self.live.held[_COPIES]
        self.live.begin()

    def _in_place_of_the_head(self, hidden: torch.Tensor) -> torch.Tensor:
        self._forward_ends()
        self.head_input = hidden.numel() * hidden.element_size()
        request = head_request()
        assert isinstance(request, LossRequest), "a fused head is asked for a loss"
        request.loss = hidden.sum()
        return request.loss

    def _mark_at(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._mark())  # type: ignore[no-untyped-call]

    def _mark(self) -> None:
        self.peaks.append(self.live.peak)
        self.marks.append(self.live.bytes)
        self.live.begin()


def _kind(operator: Any, tensor: torch.Tensor, shapes: set[torch.Size]) -> str:
    cast = operator is torch.ops.aten._to_copy.default and tensor.dtype == torch.bfloat16
    return _COPIES if cast and tensor.shape in shapes else "else"
