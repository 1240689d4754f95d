"""Memory of frozen embeddings on the host and of a quantized frozen head, for plans.

If the linear layers are in 4 bits, these two are the largest part of a model with a large
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import Shape
from steadytrain.components.shared.chunks import HEAD_BITS, QUANTIZED_BLOCK, product_rows
from steadytrain.components.shared.config import AdapterConfig
from steadytrain.components.shared.decision import Decision

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
    return 2 if setting.adapter.kind == "qlora" else setting.width


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
