"""Peak memory of a rank, by part, from formulas. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from steadytrain.components.memory.activations import (
    entry_memory,
    exit_memory,
    gradient_memory,
    layer_memory,
    plain_loss,
    stream,
)
from steadytrain.components.memory.setting import FP32, Setting
from steadytrain.components.memory.shape import LayerMemory, Shape
from steadytrain.components.memory.states import States, states, still_layers
from steadytrain.components.shared.chunks import (
    COMPARISON_COPIES,
    block_rows,
    chunk_rows,
    comparison_rows,
    product_rows,
    similarity_rows,
)

_NAMES: Final = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits and loss",
    "buffers": "buffers",
    "frozen_model": "frozen model",
    "fragmentation": "fragmentation",
    "context": "CUDA context",
}
"""Names for people of the parts of device memory."""
CUDA_CONTEXT: Final = 600 * 2**20
"""Bytes of a GPU that CUDA's context, cuBLAS and NCCL need: an assumption, not measured."""
FRAGMENTATION: Final = 0.04
"""Share of the tensors lost to the caching allocator's rounding and gaps: also an assumption."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at its peak, by part.

    moment: the moment of the step when the peak occurs.
    host: bytes of host memory for this rank's offloading and paging.
    disk: bytes of this rank's files, by offloading.
    """

    moment: str
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    frozen_model: int = 0
    fragmentation: int = 0
    context: int = 0
    host: int = 0
    disk: int = 0

    @classmethod
    def of_parts(cls, parts: Mapping[str, int], moment: str) -> Memory:
        """Build it from device bytes by name; missing names count as 0."""
        fields = {field: parts.get(name, 0) for field, name in _NAMES.items()}
        return cls(moment=moment, **fields)

    @property
    def parts(self) -> dict[str, int]:
        """The device bytes by name; without a teacher or a reference, no line for it."""
        parts = {name: getattr(self, field) for field, name in _NAMES.items()}
        if not self.frozen_model:
            del parts[_NAMES["frozen_model"]]
        return parts

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def peak_memory(shape: Shape, setting: Setting) -> Memory:
    """Return the peak of a rank's memory during a step other than the first."""
    result = max(_Step(shape, setting).moments(), key=lambda moment: moment.total)
    if not setting.cuda:
        return result
    return replace(result, fragmentation=int(FRAGMENTATION * result.total), context=CUDA_CONTEXT)


class _Step:
    """The moments of a step when memory may peak."""

    def __init__(self, shape: Shape, setting: Setting) -> None:
        self.shape, self.setting = shape, setting
        self.held: States = states(shape, setting)
        self.layer: LayerMemory = layer_memory(shape, setting)
        # A trace with activation checkpointing has seen what stays, and what is computed again.
        self.recomputes = setting.recompute and not shape.traced
        self.stored = self.layer.entry if self.recomputes else self.layer.kept
        self.learning = shape.layers - still_layers(shape, setting)
        self.outside = entry_memory(shape, setting) if self.learning == shape.layers else 0
        if setting.perturbs:
            # A perturbation and its gradient, or the sum of it and the embeddings.
            self.outside += 2 * setting.tokens * shape.hidden * FP32
        self.before = self.held.gradients - self.held.bucket if setting.keeps_gradients else 0
        # Autocast's copies of weights outlive the forward pass if backward needs them.
        self.copies = 0 if setting.recompute else self.held.copies

    def moments(self) -> Iterator[Memory]:
        """Yield the moments, in order."""
        held, layer = self.held, self.layer
        kept = self.outside + self.learning * self.stored
        kept += exit_memory(self.shape, self.setting)
        if (frozen_model := self.setting.frozen_model) is not None:
            kept += self.setting.tokens * frozen_model.matched
            forward = self.setting.tokens * frozen_model.forward
            yield self._moment(
                "the frozen model's forward pass", 0, self.before, frozen_model=forward
            )
        if self.learning < self.shape.layers:
            # Without a backward pass, nothing outlives the half of a layer that made it.
            half = max(layer.attention, layer.feed_forward)
            yield self._moment("the frozen layers' forward", layer.entry + half, self.before)
        yield from self._losses(kept)
        yield self._moment(
            "the head's backward",
            kept + self.copies + layer.entry,
            self.before + held.head_gradient,
        )
        if self.learning:
            yield from self._layers()
        if self.learning == self.shape.layers:
            # A tied table's two gradients and their sum, in addition to what has accumulated.
            tables = (2 if self.shape.tied else 0) + (1 if self.setting.keeps_gradients else 0)
            yield self._moment(
                "the embeddings' backward",
                layer.entry,
                held.gradients + tables * held.table_gradient,
            )
        yield self._moment("the update", held.update, held.gradients)

    def _losses(self, kept: int) -> Iterator[Memory]:
        """Yield the moments of a chunk of rows, with the gradients that forward computes for it."""
        held, shape, setting = self.held, self.shape, self.setting
        compared = 0
        if (frozen_model := setting.frozen_model) is not None:
            compared = setting.tokens * frozen_model.kept + frozen_model.compared
        if shape.labels:
            if setting.returns_states and setting.half:
                # What a model returns is converted to 32 bits.
                kept += (shape.layers + 1) * setting.tokens * shape.hidden * FP32
            yield self._moment("the end of forward", kept + held.copies, self.before)
            return
        if not shape.fused:
            logits = plain_loss(shape, setting)
            yield self._moment(
                "the loss", kept + held.copies, self.before, logits, frozen_model=compared
            )
            return
        # The head's input, the rows of it that have a target, and their gradient.
        targets = setting.target_tokens
        rows = shape.hidden * (setting.tokens * stream(setting) + 2 * targets * setting.width)
        rows -= gradient_memory(shape, setting)
        chunk = min(targets, chunk_rows(shape.vocabulary)) * shape.vocabulary
        kept += held.copies + held.head_copy + rows
        if setting.contrasts:
            # The gradient that similarities give the head's input. Then for one document: its
            # states, their directions and gradient; a block of similarities and their slopes.
            kept += setting.tokens * shape.hidden * stream(setting)
            block = min(setting.length, similarity_rows(setting.length)) * setting.length
            kept += (4 * setting.length * shape.hidden + 3 * block) * FP32
        gradients = self.before + held.head_sum
        # The gradient replaces the logits in place. On CPUs, 16-bit logits also need a block in 32
        # bits; Liger's kernel keeps that in registers.
        block = 0 if setting.cuda else block_rows(shape.vocabulary) * shape.vocabulary
        wide = min(chunk, block) * FP32 if setting.half else 0
        errors = chunk * setting.width
        if setting.differentiates:
            wide = COMPARISON_COPIES * FP32 * comparison_rows(shape.vocabulary) * shape.vocabulary
        yield self._moment("the loss", kept, gradients, errors + wide, frozen_model=compared)
        if setting.quantizes_head:
            # A block of the head, its part of the gradient of the head's input, and the sum.
            sums = 2 * min(targets, chunk_rows(shape.vocabulary)) * shape.hidden * FP32
            yield self._moment(
                "the head's gradient", kept + held.head_block + sums, gradients, errors
            )
            return
        part = 2 * product_rows(shape.hidden) * shape.hidden
        product = min(held.head_sum // 2, part) if setting.half else 0
        yield self._moment("the head's gradient", kept, gradients + product, errors)

    def _layers(self) -> Iterator[Memory]:
        """Yield the backward of the last layer, which runs first, and of the first layer."""
        held, layer, count = self.held, self.layer, self.learning
        keeps = self.setting.keeps_gradients
        growing = held.gradients - held.bucket
        own = growing * self.shape.layer // max(self.shape.parameters - self.shape.frozen, 1)
        recomputed = layer.kept if self.recomputes else 0
        if recomputed and stream(self.setting) == FP32:
            # The layer's input is already stored. A 16-bit input gets a 32-bit copy in addition.
            recomputed -= layer.entry
        a_layer = held.copies // max(count, 1)
        # Autocast's copies of the weights of a layer that is computed again; a trace has seen them.
        again = 0 if self.shape.traced else a_layer
        # By then, half or all of the feed-forward's matrices have their gradients.
        new = (held.layer_gradient // 3, held.layer_gradient * 2 // 3)
        if self.setting.adds_gradients:
            new = (held.weight_gradient, held.weight_gradient)
        for above, name in (
            (0, "the last layer's backward"),
            (count - 1, "the first layer's backward"),
        ):
            below = count - above
            head = 0 if keeps and not self.shape.tied else held.head_gradient
            done = head + (self.before if keeps else held.bucket + above * own)
            copies = below * a_layer if self.copies else again
            kept = self.outside + below * self.stored + recomputed + copies + layer.entry
            for half, gradient in (
                (layer.feed_forward_backward, new[0]),
                (layer.attention_backward - layer.feed_forward, new[1]),
            ):
                moment = self._moment(name, kept + half, done + gradient)
                yield replace(moment, buffers=moment.buffers + held.layers_gathered)

    def _moment(
        self, name: str, activations: int, gradients: int, logits: int = 0, *, frozen_model: int = 0
    ) -> Memory:
        """Return what is in use at a moment.

        Args:
            frozen_model: of the frozen model's, besides its weights.
        """
        held, setting = self.held, self.setting
        frozen = setting.frozen_model.weights if setting.frozen_model else 0
        return Memory(
            moment=name,
            weights=held.weights,
            gradients=gradients,
            optimizer=held.optimizer,
            activations=activations,
            logits=logits,
            buffers=held.gathered + _inputs(self.shape, setting) + setting.answers,
            frozen_model=frozen + frozen_model,
            host=held.host,
            disk=held.disk,
        )


def _inputs(shape: Shape, setting: Setting) -> int:
    """Return the bytes of three 64-bit batch tensors and the attention mask while it is built.

    A trace counts the mask among the activations.
    """
    mask = setting.tokens * setting.length if setting.masked and not shape.traced else 0
    return 3 * 8 * setting.tokens + mask
