"""What stays with a rank from step to step: weights, gradients, the optimizer's state.

Sixteen bytes a parameter with AdamW in 32 bits, and how ranks share them: Rajbhandari et al.
2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 3.1 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from steadytrain.components.train.plan.setting import FP32, NF4_BITS, Setting
from steadytrain.components.train.plan.shape import Shape
from steadytrain.components.train.strategy.zero_config import bucket_values

_MOMENTS: Final = {"adamw_torch": 8.0, "adamw_bnb_8bit": 2.03, "paged_adamw_8bit": 0.0}
"""Bytes a trained parameter on the device. In 8 bits: two moments and a 32-bit constant for each
block of 256 values of each (bitsandbytes); paged ones leave where memory is short (Dettmers et
al. 2023, "QLoRA", section 3)."""


@dataclass(frozen=True)
class States:
    """Bytes of one rank.

    gradients: at the end of backward.
    bucket: of these, whole ones on their way to where they belong, which are not there in forward.
    waits: whether gradients are there in forward too: while they accumulate, and in the buckets of
        DDP and ZeRO-3.
    head_gradient: of the head's matrix, before it is shared out; `head_sum` of the same in 32
        bits, while the loss adds it up.
    layer_gradient: of one layer, likewise.
    copies: autocast's 16-bit copies of all layers; `head_copy` of the head.
    gathered: other ranks' weights of what is in no layer; `layers_gathered` of two layers, while
        they are computed with.
    update: what the optimizer's step takes beside all that.
    host: in the host's memory, by offloading or paging.
    """

    weights: int
    gradients: int
    bucket: int
    optimizer: int
    waits: bool
    head_gradient: int
    head_sum: int
    layer_gradient: int
    copies: int
    head_copy: int
    gathered: int
    layers_gathered: int
    update: int
    host: int


def trained_parameters(shape: Shape, setting: Setting) -> int:
    """All, or the adapters' alone: rank x (inputs + outputs) each (Hu et al. 2021, section 4.1).

    A classification head is new, and trained beside adapters.
    """
    adapter = setting.adapter
    if not adapter.freezes:
        return shape.parameters
    adapted = shape.adapted(adapter.targets)
    a_layer = sum(adapter.rank * (matrix.inputs + matrix.outputs) for matrix in adapted)
    return shape.layers * a_layer + shape.labels * shape.hidden


def weight_bytes(shape: Shape, setting: Setting) -> int:
    """Of the whole model as it is kept, adapters included; not yet shared out."""
    kind, trained = setting.adapter.kind, trained_parameters(shape, setting)
    if kind == "none":
        # DeepSpeed computes with 16-bit weights; the 32-bit ones are in its optimizer.
        return trained * (2 if setting.deepspeed and setting.half else FP32)
    in_layers = shape.layers * sum(matrix.size for matrix in shape.matrices)
    frozen = shape.parameters * setting.width
    if kind == "qlora":
        frozen = (shape.parameters - in_layers) * 2 + int(in_layers * NF4_BITS / 8)
    return frozen + trained * FP32


def states(shape: Shape, setting: Setting) -> States:
    """What one rank has."""
    trained = trained_parameters(shape, setting)
    weights, gradients = weight_bytes(shape, setting), trained * FP32
    moments = int(trained * _MOMENTS[setting.optim])
    if setting.deepspeed:
        # It has 32-bit weights of its own, whatever the model computes with.
        moments += FP32 * trained
        if setting.half and not setting.adapter.freezes:
            gradients = 2 * trained
    ranks = setting.ranks
    optimizer = moments // ranks if setting.shards_optimizer else moments
    own_gradients = gradients // ranks if setting.shards_gradients else gradients
    bucket = 0
    if setting.deepspeed:
        bucket = gradients * bucket_values(trained) // max(trained, 1)
    # Of whole gradients that do not wait the bucket is a part.
    beside = bucket if setting.shards_gradients or setting.accumulates else 0
    whole_and_waiting = setting.accumulates and not setting.shards_gradients
    own_weights = weights // ranks if setting.shards_weights else weights
    host = 2 * trained if setting.optim == "paged_adamw_8bit" else 0
    if setting.offload != "none":
        optimizer, host = 0, host + optimizer
    if setting.offload == "all":
        own_weights, own_gradients, host = 0, 0, host + own_weights + own_gradients
    return States(
        weights=own_weights,
        gradients=own_gradients + beside,
        bucket=0 if setting.strategy == "zero3" or whole_and_waiting else bucket,
        optimizer=optimizer,
        waits=setting.accumulates or setting.strategy in ("ddp", "zero3"),
        head_gradient=_head_values(shape, setting)
        * (2 if setting.deepspeed and setting.half else FP32),
        head_sum=_head_values(shape, setting) * FP32,
        layer_gradient=gradients * shape.layer // max(shape.parameters, 1),
        copies=_copies(shape, setting) * shape.layers,
        head_copy=_head_copy(shape, setting),
        gathered=_gathered(shape, setting),
        layers_gathered=_layers_gathered(shape, setting),
        update=_update(shape, setting, trained),
        host=host,
    )


def _head_values(shape: Shape, setting: Setting) -> int:
    """Of a language model's head, where it is trained."""
    return 0 if setting.adapter.freezes or shape.labels else shape.vocabulary * shape.hidden


def _copies(shape: Shape, setting: Setting) -> int:
    """Of a layer; 4-bit weights are unpacked one matrix at a time."""
    if setting.adapter.kind == "qlora":
        return 0
    size = sum(matrix.size for matrix in shape.matrices)
    return 2 * size if setting.casts_weights else 0


def _head_copy(shape: Shape, setting: Setting) -> int:
    if shape.labels or not setting.casts_weights:
        return 0
    return 2 * shape.vocabulary * shape.hidden


def _gathered(shape: Shape, setting: Setting) -> int:
    """Embeddings and head stay whole from forward to the end of backward.

    With ZeRO-3 a bucket of weights does (`stage3_max_live_parameters`).
    """
    if not setting.gathers:
        return 0
    if setting.strategy == "zero3":
        return setting.width * bucket_values(shape.parameters)
    return setting.width * (shape.embeddings + shape.head)


def _layers_gathered(shape: Shape, setting: Setting) -> int:
    """Two layers at a time, the one that is computed and the next.

    So FSDP does it (Zhao et al. 2023, "PyTorch FSDP", section 3.3); ZeRO-3 gathers by buckets.
    Of 4-bit weights one matrix at a time is unpacked to 16 bits.
    """
    if setting.adapter.kind == "qlora":
        return 2 * max(matrix.size for matrix in shape.matrices)
    apart = setting.gathers and setting.strategy != "zero3"
    return 2 * setting.width * shape.layer if apart else 0


def _update(shape: Shape, setting: Setting, trained: int) -> int:
    """On a GPU AdamW goes over all tensors at once, with an intermediate as large as they are
    (PyTorch's documentation of `foreach`); on a CPU over one at a time, with two, while the last
    one's is still there. 8-bit and DeepSpeed's kernels work in place, offloaded ones elsewhere.
    """
    if setting.optim != "adamw_torch" or setting.deepspeed or setting.offload != "none":
        return 0
    if setting.cuda:
        return FP32 * trained // (setting.ranks if setting.shards_optimizer else 1)
    adapted = setting.adapter.freezes
    second = max(matrix.size for matrix in shape.matrices)
    return 0 if adapted else FP32 * (2 * shape.largest + second)
