"""A model built from its architecture alone, for trial runs: with random weights, or of fakes.

Operators run on fake tensors, but nothing is computed.

`LiveTensors` counts the bytes of live tensors, real ones or fakes, while operators run.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
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


class Repeated(NamedTuple):
    """The kinds of layers repeat after `period` layers, from layer `first` on.

    few: enough layers for a period that neither begins nor follows the first layer, since what the
        embeddings made may live until the second one. They end with the same kind as all layers.
    """

    first: int
    period: int
    few: int


def repeated_layers(architecture: Mapping[str, Any], labels: int = 0) -> Repeated | None:
    """Return how a model's layers repeat; None if fewer layers would not stand for all of them.

    Args:
        architecture, labels: as for `random_model`.
    """
    layers = layers_in(architecture, labels)
    with torch.device("meta"):
        whole = plain_model(architecture, labels)
        repetition = _repeated(_kinds(_described(whole, layers)))
        if repetition is None:
            return None
        part = plain_model(with_layers(architecture, repetition.few), labels)
    kept, described = _described(part, repetition.few), _described(whole, layers)
    left_out = {
        parameter
        for stack in stacks_of(whole, layers)
        for layer in stack[repetition.few :]
        for parameter in layer.parameters()
    }
    sizes = sum(item.numel() for item in whole.parameters() if item not in left_out)
    same = sizes == sum(item.numel() for item in part.parameters())
    return repetition if same and kept == described[: repetition.few] else None


def layers_in(architecture: Mapping[str, Any], labels: int = 0) -> int:
    """Return the number of layers that a configuration asks for; 0 if it does not say."""
    layers = getattr(_config(architecture, labels).get_text_config(), "num_hidden_layers", 0)
    return layers if isinstance(layers, int) else 0


def stacks_of(model: torch.nn.Module, layers: int) -> list[torch.nn.ModuleList]:
    """Return the lists of that many layers that no other such list contains."""
    stacks: dict[str, torch.nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, torch.nn.ModuleList) and 0 < len(module) == layers and not inside:
            stacks[name] = module
    return list(stacks.values())


def _described(model: torch.nn.Module, layers: int) -> list[dict[tuple[Any, ...], Any]]:
    """Return what each layer consists of: its modules, their sizes and their settings."""
    result: list[dict[tuple[Any, ...], Any]] = [{} for _ in range(layers)]
    for number, stack in enumerate(stacks_of(model, layers)):
        for index, layer in enumerate(stack):
            for name, module in layer.named_modules():
                key = (number, name)
                shapes = {key: item.shape for key, item in module.named_parameters(recurse=False)}
                result[index][key] = (type(module), module.extra_repr(), shapes)
                for field, value in vars(module).items():
                    if isinstance(value, int | str):
                        result[index][*key, field] = value
    return result


def _kinds(layers: Sequence[Mapping[Any, Any]]) -> list[Mapping[Any, Any]]:
    """Return the layers without what counts them."""
    last = layers[-1] if layers else {}
    numbers = {
        key
        for key, value in last.items()
        if value == len(layers) - 1
        and all(layer.get(key) == index for index, layer in enumerate(layers))
    }
    return [{key: value for key, value in layer.items() if key not in numbers} for layer in layers]


def _repeated(kinds: Sequence[Any]) -> Repeated | None:
    """Return how a sequence of kinds repeats with the fewest layers; None if that is not fewer."""
    if not any(kinds):
        return None
    repetitions = (_repeated_after(kinds, period) for period in range(1, len(kinds)))
    least = min(repetitions, key=lambda each: each.few, default=None)
    return least if least and least.few < len(kinds) else None


def _repeated_after(kinds: Sequence[Any], period: int) -> Repeated:
    first = len(kinds) - period
    while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
        first -= 1
    few = first + period + 2
    return Repeated(first, period, few + (len(kinds) - few) % period)


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


_WARM_UP: Final = 3
_PASSES: Final = 11


def measure_latency(architecture: Mapping[str, Any], labels: int, length: int) -> float:
    """Return the median milliseconds of a forward pass of one sequence, on the default device.

    It depends on the architecture and the device, not on the weights, so it can be measured before
    training. The process's random numbers go on as if nothing had been measured.

    Args:
        architecture, labels: as for `random_model`; the weights are float32.
        length: tokens in the sequence.
    """
    with torch.random.fork_rng():
        model = plain_model(architecture, labels).eval()
        tokens = torch.zeros(1, length, dtype=torch.long)
    seconds = [_pass(model, tokens) for _ in range(_WARM_UP + _PASSES)][_WARM_UP:]
    return 1e3 * statistics.median(seconds)


@torch.inference_mode()
def _pass(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    began = time.perf_counter()
    model(input_ids=tokens)
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    return time.perf_counter() - began


Naming = Callable[[Any, torch.Tensor], str]
"""Returns the name that an operator's result is counted under."""


def by_operator(operator: Any, tensor: torch.Tensor) -> str:
    """Return the operator itself, with its result's type and shape."""
    return f"{operator} {str(tensor.dtype)[6:]} {tuple(tensor.shape)}"


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storages by name.

    It only sees what an operator returns, not the scratch space within a kernel.

    now: the moment that it is.
    peaks: for each moment, bytes by name when most were alive.
    """

    def __init__(self, naming: Naming = by_operator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.naming = naming
        self.now: Any = ""
        self.live: dict[int, tuple[int, str]] = {}
        self.bytes, self.held = 0, Counter[str]()
        self.begin()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; hiding each operator from the compiler takes a while."""
        return False

    def begin(self) -> None:
        """Forget the peaks."""
        self.peaks: dict[Any, Mapping[str, int]] = {}
        self._most: dict[Any, int] = {}

    @property
    def peak(self) -> int:
        """The most bytes at a time."""
        return max(self._most.values(), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor, self.naming(func, tensor))
        if self.bytes > self._most.get(self.now, 0):
            self._most[self.now], self.peaks[self.now] = self.bytes, dict(self.held)
        return result

    def see(self, tensor: torch.Tensor, name: str) -> None:
        """Count the tensor's storage until it is freed; for a sharded tensor, this rank's part."""
        storage = _storage(tensor)
        key = storage._cdata
        if key in self.live or tensor.device.type == "meta":
            return
        self._add(key, storage.nbytes(), name)
        weakref.finalize(storage, self._forget, key).atexit = False

    def rename(self, tensor: torch.Tensor, name: str) -> None:
        """Count a known tensor under another name."""
        key = _storage(tensor)._cdata
        if key in self.live:
            self._add(key, self._forget(key), name)

    def __enter__(self) -> Self:
        """Also count resizing: FSDP frees gathered weights that way, and it is not an operator."""
        self.resize = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self.live:
                _, name = self.live[storage._cdata]
                self._forget(storage._cdata)
                self._add(storage._cdata, size, name)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _add(self, key: int, size: int, name: str) -> None:
        self.live[key] = (size, name)
        self.bytes += size
        self.held[name] += size

    def _forget(self, key: int) -> int:
        size, name = self.live.pop(key)
        self.bytes -= size
        self.held[name] -= size
        return size


def first_tensor(given: Any) -> torch.Tensor:
    """Return the first floating-point tensor of a layer's arguments or results."""
    tensors = (item for item in tree_iter(given) if isinstance(item, torch.Tensor))
    return next(tensor for tensor in tensors if tensor.is_floating_point())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
