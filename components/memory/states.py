"""What a rank keeps from step to step: weights, gradients, optimizer state.

Sixteen bytes per parameter with AdamW in 32 bits, and how ranks share them: Rajbhandari et al.
2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 3.1 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from steadytrain.components.memory.setting import FOUR_BITS, FP32, Setting
from steadytrain.components.memory.shape import Shape
from steadytrain.components.shared.chunks import HEAD_BITS, QUANTIZED_BLOCK, product_rows
from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.shared.config.fields import Decision
from steadytrain.components.shared.config.optimizers import optimizer_spec
from steadytrain.components.shared.config.strategies import DISK

LARGEST_BUCKET: Final = 50_000_000
"""Values that ranks exchange at a time. DeepSpeed's own default is ten times as large, and
allocated regardless of the model's size: 4 GB of a GPU."""


def bucket_values(parameters: int) -> int:
    """Return the values of a bucket for a number of parameters."""
    return min(LARGEST_BUCKET, parameters)


LARGEST_GROUP: Final = 50_000_000
"""Trained values of a rank that DeepSpeed moves between host memory and disk at a time, unless a
single weight has more."""


def swap_buffers(tensors: int) -> int:
    """Return the buffers for such a group: weights, gradients, and what the optimizer keeps.

    Args:
        tensors: how many tensors the optimizer keeps for each weight.
    """
    return tensors + 2


@dataclass(frozen=True)
class States:
    """Bytes of one rank.

    gradients: at the end of backward.
    bucket: the part of `gradients` that is full gradients being exchanged; it doesn't exist in
        forward.
    head_gradient: of the head's matrix, before it is sharded. `head_sum`: the same in 32 bits,
        while the loss accumulates it. `table_gradient`: of the embeddings' table.
    layer_gradient: of one layer, before it is sharded. `weight_gradient`: of its largest weight.
    copies: autocast's 16-bit copies of all layers. `head_copy`: of the head. `head_block`: the part
        of a quantized head that is unpacked at a time.
    gathered: other ranks' weights outside the layers. `layers_gathered`: of two layers, while they
        are used.
    update: what the optimizer step needs in addition.
    host: in host memory, by offloading or paging.
    disk: in files, by offloading.
    """

    weights: int
    gradients: int
    bucket: int
    optimizer: int
    head_gradient: int
    head_sum: int
    table_gradient: int
    layer_gradient: int
    weight_gradient: int
    copies: int
    head_copy: int
    head_block: int
    gathered: int
    layers_gathered: int
    update: int
    host: int
    disk: int


def trained_parameters(shape: Shape, setting: Setting) -> int:
    """Return the model's own parameters, or the adapters': rank x (inputs + outputs) per matrix.

    Parameters that are frozen at first count as trained: the peak comes after. So does the
    projection of a comparison of hidden states.

    The adapter formula is from Hu et al. 2021, section 4.1. A classification head is new, so it is
    trained along with adapters.
    """
    adapter = setting.adapter
    projection = setting.frozen_model.projection if setting.frozen_model else 0
    if not adapter.freezes:
        return shape.parameters - shape.frozen + projection
    adapted = shape.adapted(adapter.targets)
    a_layer = sum(adapter.rank * (matrix.inputs + matrix.outputs) for matrix in adapted)
    return shape.layers * a_layer + shape.labels * shape.hidden + projection


def still_layers(shape: Shape, setting: Setting) -> int:
    """Return the layers, from the first one, that have no backward pass."""
    return 0 if setting.perturbs else shape.still


def matrix_share(shape: Shape, setting: Setting) -> float:
    """Return the share of the trained parameters that are in matrices of the layers.

    Apart from a classification head, adapters consist of such matrices.
    """
    trained = trained_parameters(shape, setting)
    if setting.adapter.freezes:
        return 1 - shape.labels * shape.hidden / trained
    # Frozen parameters may be anywhere; the rest is taken to be like the whole model.
    return shape.layers * sum(matrix.size for matrix in shape.matrices) / shape.parameters


def weight_bytes(shape: Shape, setting: Setting) -> int:
    """Return the bytes of the complete model as stored, with adapters, before sharding."""
    kind, trained = setting.adapter.kind, trained_parameters(shape, setting)
    if kind == "none":
        # DeepSpeed computes with 16-bit weights; the 32-bit ones are in its optimizer.
        # Other trained parameters, such as a projection, count too.
        values = trained + shape.frozen
        return values * (2 if setting.deepspeed and setting.half else FP32)
    in_layers = shape.layers * sum(matrix.size for matrix in shape.matrices)
    frozen = shape.parameters * frozen_width(setting)
    if kind == "qlora":
        outside = (shape.parameters - in_layers) * frozen_width(setting)
        if setting.adapter.quantization == "int8":
            scales = shape.layers * sum(matrix.outputs for matrix in shape.matrices)
            frozen = outside + in_layers + FP32 * scales
        else:
            frozen = outside + int(in_layers * FOUR_BITS / 8)
    return frozen - saved_outside(shape, setting) + trained * FP32


def states(shape: Shape, setting: Setting) -> States:
    """Return the states of one rank."""
    trained = trained_parameters(shape, setting)
    weights, gradients = weight_bytes(shape, setting), trained * FP32
    kept, matrices = optimizer_spec(setting.optim), matrix_share(shape, setting)
    state = int(trained * kept.device_bytes(matrices))
    if kept.factored:
        state += FP32 * factored_values(shape, setting)
    if setting.deepspeed:
        # It keeps its own 32-bit weights, whatever the model computes with.
        state += FP32 * trained
        if setting.half and not setting.adapter.freezes:
            gradients = 2 * trained
    ranks = setting.ranks
    optimizer = state // ranks if setting.shards_optimizer else state
    own_gradients = gradients // ranks if setting.shards_gradients else gradients
    # Training components' tensors are sharded and offloaded like the optimizer's state.
    copies = FP32 * trained * setting.weight_copies
    optimizer += copies // ranks if setting.shards_optimizer else copies
    bucket = 0
    if setting.deepspeed:
        bucket = gradients * bucket_values(trained) // max(trained, 1)
    # Full gradients that don't accumulate already include the bucket.
    buckets = bucket if setting.shards_gradients or setting.accumulates else 0
    whole_and_waiting = setting.accumulates and not setting.shards_gradients
    own_weights = weights // ranks if setting.shards_weights else weights
    gradient_width = 2 if setting.deepspeed and setting.half else FP32
    table = shape.vocabulary * shape.hidden
    a_layer = gradients * shape.layer // max(shape.parameters - shape.frozen, 1)
    host = int(trained * kept.host_bytes(matrices)) + host_table(shape, setting)
    disk = 0
    if setting.offload == DISK:
        # Training components' tensors are never in these files.
        disk, optimizer = (state + FP32 * trained) // ranks, 0
        group = min(LARGEST_GROUP + shape.embeddings // ranks, trained // ranks)
        host += FP32 * group * swap_buffers(len(kept.tensors)) + copies // ranks
    elif setting.offload != "none":
        optimizer, host = 0, host + optimizer
    if setting.offload == "all":
        own_weights, own_gradients, host = 0, 0, host + own_weights + own_gradients
    return States(
        weights=own_weights,
        gradients=own_gradients + buckets,
        bucket=0 if setting.by_buckets or whole_and_waiting else bucket,
        optimizer=optimizer,
        head_gradient=_head_values(shape, setting) * gradient_width,
        head_sum=_head_values(shape, setting) * FP32,
        table_gradient=0 if setting.adapter.freezes else table * gradient_width,
        layer_gradient=a_layer,
        weight_gradient=a_layer * _largest_weight(shape) // max(shape.layer, 1),
        # Autocast keeps no copy of a frozen weight.
        copies=_copies(shape, setting) * (shape.layers - shape.still),
        head_copy=_head_copy(shape, setting),
        head_block=head_block(shape, setting),
        gathered=_gathered(shape, setting),
        layers_gathered=_layers_gathered(shape, setting),
        update=_update(setting, trained),
        host=host,
        disk=disk,
    )


def _largest_weight(shape: Shape) -> int:
    """Return the values of a layer's largest weight."""
    return max((*(matrix.size for matrix in shape.matrices), *shape.experts), default=0)


def _head_values(shape: Shape, setting: Setting) -> int:
    """Return the values of a language model's head, if it is trained."""
    frozen = setting.adapter.freezes or (shape.tied and shape.still)
    return 0 if frozen or shape.labels else shape.vocabulary * shape.hidden


def _copies(shape: Shape, setting: Setting) -> int:
    """Return the bytes of a layer's copies; quantized ones are unpacked one matrix at a time."""
    if setting.adapter.kind == "qlora":
        return 0
    size = sum(matrix.size for matrix in shape.matrices)
    return 2 * size if setting.casts_weights else 0


def _head_copy(shape: Shape, setting: Setting) -> int:
    if shape.labels or not setting.casts_weights:
        return 0
    return 2 * shape.vocabulary * shape.hidden


def _gathered(shape: Shape, setting: Setting) -> int:
    """Return the bytes of embeddings and head, which stay gathered until the end of backward.

    With ZeRO-3, a bucket of weights does (`stage3_max_live_parameters`).
    """
    if not setting.gathers:
        return 0
    if setting.by_buckets:
        return setting.width * bucket_values(shape.parameters)
    return setting.width * (shape.embeddings + shape.head)


def _layers_gathered(shape: Shape, setting: Setting) -> int:
    """Return the bytes of two gathered layers: the one being computed and the next.

    FSDP works like this (Zhao et al. 2023, "PyTorch FSDP", section 3.3); ZeRO-3 gathers by buckets.
    Quantized weights are unpacked one matrix at a time.
    """
    if setting.adapter.kind == "qlora":
        return frozen_width(setting) * max(matrix.size for matrix in shape.matrices)
    by_layer = setting.gathers and not setting.by_buckets
    return 2 * setting.width * shape.layer if by_layer else 0


def _update(setting: Setting, trained: int) -> int:
    """Return the bytes that the optimizer step needs in addition on the device."""
    if setting.deepspeed or setting.offload != "none":
        return 0
    spec = optimizer_spec(setting.optim)
    needed = spec.scaled_update_bytes if setting.precision == "fp16" else spec.update_bytes
    return int(needed * trained) // (setting.ranks if setting.shards_optimizer else 1)


def factored_values(shape: Shape, setting: Setting) -> int:
    """Return the values that an optimizer keeps that factors second moments.

    That is Adafactor (Shazeer and Stern 2018). Of a trained matrix it keeps one value for each row
    and column, and of a vector one for each weight.

    Outside the layers, a shape has totals only. What is left after the tables and square matrices
    that fit in counts as vectors, which can be a few values too many for each unit of width.
    """
    adapter = setting.adapter
    if adapter.freezes:
        each = (
            2 * adapter.rank + matrix.inputs + matrix.outputs
            for matrix in shape.adapted(adapter.targets)
        )
        return shape.layers * sum(each) + (shape.labels + shape.hidden if shape.labels else 0)
    in_layer = sum(matrix.inputs + matrix.outputs for matrix in shape.matrices) + shape.vectors
    whole = shape.layers * (in_layer + _factored_experts(shape)) + _factored_outside(shape)
    # Frozen parameters may be anywhere; the rest is taken to be like the whole model.
    return whole * (shape.parameters - shape.frozen) // max(shape.parameters, 1)


def _factored_experts(shape: Shape) -> int:
    """Return the values for the experts of a layer, whose weights are stacked in few tensors."""
    if not shape.experts:
        return 0
    count = max(1, round(sum(shape.experts) * shape.chosen / max(shape.used, 1)))
    sides = (shape.hidden + size // (count * shape.hidden) for size in shape.experts)
    return count * sum(sides)


def _factored_outside(shape: Shape) -> int:
    words, square = shape.vocabulary, shape.hidden
    values = _factored_tables(shape.embeddings, shape.hidden, [words, shape.positions])
    last = shape.labels or (0 if shape.tied else words)
    return values + _factored_tables(shape.head, shape.hidden, [last, square])


def _factored_tables(values: int, width: int, rows: Iterable[int]) -> int:
    """Return the values for tables of these numbers of rows, and for the rest as vectors."""
    kept = 0
    for count in rows:
        if 0 < count * width <= values:
            kept, values = kept + count + width, values - count * width
    return kept + values


FrozenEmbeddings = Literal["device", "host"]
FrozenHead = Literal["as_loaded", "8bit", "4bit"]
_EMBEDDINGS: Final = "model.adapter.frozen_embeddings"
_HEAD: Final = "model.adapter.frozen_head"
_ERRORS: Final = {"8bit": "0.6 %", "4bit": "9 %"}
"""Root mean square errors for normally distributed weights; tests check the code against them."""


def lighter(shape: Shape) -> Iterator[tuple[FrozenEmbeddings, FrozenHead]]:
    """Yield what to try when the layers can't get smaller, the most exact first."""
    if not shape.tied:
        yield "host", "as_loaded"
    if not shape.labels and shape.hidden % QUANTIZED_BLOCK == 0:
        yield "host", "8bit"
        yield "host", "4bit"


def frozen_width(setting: Setting) -> int:
    """Return the bytes of a frozen value that is not quantized."""
    return 2 if setting.adapter.kind == "qlora" and setting.cuda else setting.width


def host_table(shape: Shape, setting: Setting) -> int:
    """Return the bytes of embeddings that are off the GPU; a CPU's memory is the host's."""
    on_host = setting.adapter.freezes and setting.adapter.frozen_embeddings == "host"
    values = shape.vocabulary * shape.hidden if on_host and setting.cuda else 0
    return values * frozen_width(setting)


def saved_outside(shape: Shape, setting: Setting) -> int:
    """Return the bytes saved on the device. Quantizing a tied head gives it a separate table."""
    saved = host_table(shape, setting)
    if setting.quantizes_head:
        values = shape.vocabulary * shape.hidden
        whole = 0 if shape.tied else values * frozen_width(setting)
        saved += whole - int(values * HEAD_BITS[setting.adapter.frozen_head] / 8)
    return saved


def head_block(shape: Shape, setting: Setting) -> int:
    """Return the bytes of a quantized head that are unpacked at a time."""
    rows = min(shape.vocabulary, product_rows(shape.hidden))
    return rows * shape.hidden * setting.width if setting.quantizes_head else 0


def frozen_decisions(shape: Shape, setting: Setting) -> Iterator[Decision]:
    """Yield decisions about frozen weights in another form, chosen only if nothing else fits."""
    adapter, values = setting.adapter, shape.vocabulary * shape.hidden
    whole = values * frozen_width(setting) / 1e9
    if host_table(shape, setting):
        yield Decision(
            _EMBEDDINGS,
            adapter.frozen_embeddings,
            f"their {whole:.2f} GB would not fit on the GPU; rows are looked up in host memory, "
            "with the same values",
        )
    if setting.quantizes_head:
        yield Decision(
            _HEAD,
            adapter.frozen_head,
            f"its {whole:.2f} GB as loaded would not fit; it is stored in "
            f"{values * HEAD_BITS[adapter.frozen_head] / 8e9:.2f} GB, off by "
            f"{_ERRORS[adapter.frozen_head]}, and the exported model has the original head",
        )


def frozen_problems(shape: Shape, adapter: AdapterConfig) -> Iterator[str]:
    """Yield reasons why the user's settings for frozen weights are impossible."""
    if shape.tied and adapter.frozen_embeddings == "host" and adapter.frozen_head == "as_loaded":
        yield (
            f"{_EMBEDDINGS} = host: the head is the same table and would keep it on the GPU; "
            f"the nearest setting that works is {_HEAD}=8bit as well"
        )
    if adapter.frozen_head != "as_loaded" and shape.hidden % QUANTIZED_BLOCK:
        yield (
            f"{_HEAD} = {adapter.frozen_head}: the head takes {shape.hidden} values, which is "
            f"not a multiple of {QUANTIZED_BLOCK}; the nearest setting that works is as_loaded"
        )
