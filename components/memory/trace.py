"""The shape and the activations of a model without a formula, from Transformers and fake tensors.

Modules without weights give the sizes. Hooks on the layers record how much is alive when each one
starts and ends, forward and backward. The peak formula uses these numbers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    __version__,
)
from transformers.pytorch_utils import Conv1D

from steadytrain.components.memory.groups import Group, count, grouped, layers_of, still_layers
from steadytrain.components.memory.random_model import (
    LAYER_COUNTS,
    LiveTensors,
    Repeated,
    batch_of,
    fake,
    fake_mode,
    first_tensor,
    layers_in,
    loss_of,
    random_model,
    repeated_layers,
    with_layers,
)
from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import Activations, LayerMemory, Matrix, Shape
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.document import shown
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.tasks.base import Batch
from steadytrain.components.tasks.document_attention import Documents
from steadytrain.components.tasks.documents import other_attention, pass_documents, unlike
from steadytrain.components.tasks.fused_head import FusedHead, LossRequest, head_request
from steadytrain.components.techniques.modules import eval_mode
from steadytrain.components.techniques.multi_task.weights import attach_uncertainty

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
        documents=labels == 0 and _receives_documents(model),
        sdpa=not other_attention(model),
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


def _receives_documents(model: Any) -> bool:
    """Return whether a packed row's documents reach the attention. A run checks its outputs."""
    ids = torch.zeros((1, sum(_ASKED)), dtype=torch.int64, device="meta")
    documents = Documents(list(_ASKED))
    try:
        with eval_mode(model), pass_documents(documents) as extra:
            model(input_ids=ids, position_ids=ids, use_cache=False, **extra)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    return not unlike(documents)


_LAYERS: Final = 12
"""Maximum number of traced layers, if they do not repeat after fewer."""
_SIZES: Final = (1, 8, 64)
"""Traced micro-batches; between two of them, memory grows linearly."""
_COPIES: Final = "copies"
_GRADIENTS: Final = "gradients"


@dataclass(frozen=True)
class Readings:
    """Bytes of one micro-batch.

    entry: a layer's input.
    outside: what the embeddings keep in addition to the first layer's input, and what the first
        layers keep in addition to `kept`.
    kept: by a layer: on average, of those that repeat.
    exit: what the last norm keeps, and the gradient of the head's input.
    loss: what a plain loss adds to what is kept, including the head's gradient.
    backward: the most that a layer's backward adds, besides the incoming gradient and two thirds of
        its weights' gradients; with what it computes again, copies of weights too.
    added: the same while each weight's gradient is added to an existing one and freed, besides the
        incoming gradient and the largest weight's.
    """

    entry: float
    outside: float
    kept: float
    exit: float
    loss: float
    backward: float
    added: float

    def towards(self, other: Readings, share: float) -> Readings:
        """Interpolate linearly; 0 returns this one, 1 the other."""
        ends = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Readings(*(first + (second - first) * share for first, second in ends))

    def as_activations(self, setting: Setting) -> Activations:
        """Convert to the input of the peak formula; the layer is not split into halves."""
        backward = int(self.added if setting.adds_gradients else self.backward)
        layer = LayerMemory(
            entry=int(self.entry),
            attention=int(self.kept),
            feed_forward=0,
            attention_backward=backward,
            feed_forward_backward=backward,
        )
        return Activations(layer, int(self.outside), int(self.exit), int(self.loss))


class Traced:
    """An architecture's activations by setting; each kind of pass is traced once.

    exact: whether each micro-batch is traced, and not only those of `_SIZES`.
    """

    def __init__(
        self, architecture: Mapping[str, Any], layers: int, labels: int, *, exact: bool = False
    ) -> None:
        self.whole, self.layers, self.labels = architecture, layers, labels
        self.exact = exact
        self.seen: dict[Setting, Readings] = {}

    @functools.cached_property
    def repeated(self) -> Repeated | None:
        return repeated_layers(self.whole, self.labels)

    @functools.cached_property
    def architecture(self) -> Mapping[str, Any]:
        if self.repeated:
            return with_layers(self.whole, self.repeated.few)
        if layers_in(self.whole, self.labels) > self.layers:
            # A layer runs several times (ALBERT): each pass keeps what it needs.
            return self.whole
        return with_layers(self.whole, min(self.layers, _LAYERS))

    def __call__(self, setting: Setting) -> Activations:
        """Return the activations of a micro-batch, on the line through the two nearest sizes."""
        size = setting.micro_batch * setting.copies
        above = next((each for each in _SIZES[1:] if size <= each), _SIZES[-1])
        below = _SIZES[_SIZES.index(above) - 1]
        if size in _SIZES or self.exact:
            below = above = size
        few, many = (self._at(_as_traced(setting, each, self.labels)) for each in (below, above))
        share = (size - below) / (above - below) if above > below else 0.0
        return few.towards(many, share).as_activations(setting)

    def _at(self, setting: Setting) -> Readings:
        if setting not in self.seen:
            with (
                foreign(
                    f"model_type = {self.whole.get('model_type')!r}: a pass fails when the "
                    "plan traces it",
                    "check the model's configuration, plan by formula (--formula) if there is one, "
                    "or try a few training steps",
                ),
                warnings.catch_warnings(action="ignore"),
            ):
                architecture = self.architecture
                if setting.cuda:
                    architecture = without_attention_dropout(architecture)
                period = self.repeated.period if self.repeated else 0
                self.seen[setting] = _trace(architecture, setting, self.labels, period)
        return self.seen[setting]


def _as_traced(setting: Setting, size: int, labels: int) -> Setting:
    """Return only what the passes depend on; of strategies, only who casts the weights.

    Padding is always masked: Transformers detects it from values, which fakes don't have.
    """
    kind = "none" if setting.adapter.kind == "none" else "lora"
    return Setting(
        length=setting.length,
        micro_batch=size,
        precision="bf16" if setting.half else "fp32",
        recompute=setting.recompute,
        masked=setting.masked or labels > 0,
        strategy="single" if setting.casts_weights or not setting.half else "fsdp",
        # Memory on the host would count as the device's.
        adapter=setting.adapter.model_copy(update={"kind": kind, "frozen_embeddings": "device"}),
        cuda=setting.cuda,
    )


def without_attention_dropout(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Turn off attention dropout: the traced CPU kernels keep its mask, but a GPU's don't."""
    filled = AutoConfig.for_model(**architecture).to_dict()
    off = {
        name: 0.0
        for name, value in filled.items()
        if "att" in name and "drop" in name and isinstance(value, float)
    }
    return {**architecture, **off}


def _trace(architecture: Mapping[str, Any], setting: Setting, labels: int, period: int) -> Readings:
    """Run a forward and a backward pass.

    Args:
        period: after how many layers the last ones repeat; 0 if they do not.
    """
    with fake_mode():
        with torch.device("meta"):
            model: Any = random_model(architecture, setting, labels)
        whole = setting.half and not setting.casts_weights and not setting.adapter.freezes
        fake(model, torch.bfloat16 if whole else None)
        batch = batch_of(setting, labels)
        watch = _Watch(model, setting, batch, period)
        if not setting.masked:
            batch["lengths"] = [setting.length] * setting.micro_batch
        model.train()
        if setting.recompute and model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
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

    def __init__(self, model: Any, setting: Setting, batch: Batch, period: int) -> None:
        layers, self.period = layers_of(model), period
        shapes = {parameter.shape for parameter in model.parameters()}
        self.live = LiveTensors(lambda operator, tensor: _kind(operator, tensor, shapes))
        self.count = len(layers)
        gradient = setting.width if setting.strategy == "fsdp" else 4
        trained = [p.numel() for layer in layers for p in layer.parameters() if p.requires_grad]
        self.gradients = gradient * sum(trained) / self.count
        self.largest_gradient = gradient * max(trained, default=0)
        for tensor in (*model.parameters(), *model.buffers(), *batch.values()):
            self.live.see(tensor, "held")
        self.base = self.live.bytes
        self.entry = self.head_input = 0
        self.began: float | None = None
        self.before_loss = 0.0
        self.ends: list[float] = []
        self.held: list[Counter[str]] = []
        self.copies = 0
        self.loss_peak = 0.0
        self.grown: list[float] = []
        self.added: list[float] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_ends)
        for layer in layers:
            layer.register_forward_pre_hook(self._layer_begins, with_kwargs=True)
            layer.register_forward_hook(self._layer_ends)
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if head is None:
            model.register_forward_hook(lambda *_: self._forward_ends())
        elif isinstance(head, FusedHead):
            # The formula covers the memory of the loss within the head.
            head.forward = self._replace_head
        else:
            head.register_forward_pre_hook(lambda *_: self._forward_ends())

    def readings(self) -> Readings:
        """Return the readings after forward and backward."""
        assert self.began is not None, "no layer of the model has run"
        self._mark()
        in_layers = slice(1, 1 + len(self.ends))
        kept = (self.ends[-1] - self.began) / self.count
        if self.period:
            kept = (self.ends[-1] - self.ends[-1 - self.period]) / self.period
        outside = self.ends[-1] - self.count * kept - self.base - self.entry
        exit_, loss = self.before_loss - self.ends[-1] + self.entry, 0.0
        if self.head_input:
            # Tensors that only the forward pass refers to are freed before the backward pass.
            freed = self.ends[-1] - (self.held[0].total() - self.held[0][_COPIES])
            outside -= freed
            # The formula counts the head's input with the loss; here, its gradient counts.
            exit_ += freed + self.entry - self.head_input
        else:
            loss = self.loss_peak - self.copies - self.before_loss
        return Readings(
            entry=self.entry,
            outside=outside,
            kept=kept,
            exit=exit_,
            loss=loss,
            backward=max(self.grown[in_layers]) - self.gradients * 2 / 3,
            added=max(self.added[in_layers]) - self.largest_gradient,
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
        # A layer that is computed again in the backward pass ends there too.
        if not self.before_loss:
            self.ends.append(self._now())
            self._mark_at(first_tensor(given))

    def _forward_ends(self) -> None:
        self.before_loss, self.copies = self._now(), self.live.held[_COPIES]
        self.live.begin()

    def _replace_head(self, hidden: torch.Tensor) -> torch.Tensor:
        self._forward_ends()
        self.head_input = hidden.numel() * hidden.element_size()
        request = head_request()
        assert isinstance(request, LossRequest), "a fused head is asked for a loss"
        request.loss = hidden.sum()
        return request.loss

    def _mark_at(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._mark())  # type: ignore[no-untyped-call]

    def _gradient_ends(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.live.rename(parameter.grad, _GRADIENTS)
        # The most that was alive is recorded for each amount of gradients.
        self.live.now = self.live.held[_GRADIENTS]

    def _mark(self) -> None:
        before = self.held[-1] if self.held else Counter[str]()
        moments = [Counter(each) for each in self.live.peaks.values()]
        if not self.held:
            self.loss_peak = self.live.peak
        grown = [each.total() - before.total() for each in moments]
        news = (each[_GRADIENTS] - before[_GRADIENTS] for each in moments)
        added = (most - new for most, new in zip(grown, news, strict=True))
        self.grown.append(max(grown, default=0))
        self.added.append(max(added, default=0))
        self.held.append(Counter(self.live.held))
        self.live.begin()


def _kind(operator: Any, tensor: torch.Tensor, shapes: set[torch.Size]) -> str:
    cast = operator is torch.ops.aten._to_copy.default and tensor.dtype == torch.bfloat16
    return _COPIES if cast and tensor.shape in shapes else "else"
