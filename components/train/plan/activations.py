"""What the forward pass keeps for the backward pass, counted operator by operator.

The method is that of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4: each operator keeps what its derivative needs. What each of
Transformers' layers keeps under autocast was read off the live tensors of real steps
(`live_tensors.py`); tests hold the sums to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steadytrain.components.train.plan.setting import FP32, Setting
from steadytrain.components.train.plan.shape import Matrix, Shape


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer for a micro-batch.

    entry: its input, which is all that remains when the rest is recomputed.
    attention, feed_forward: what their halves keep.
    attention_backward, feed_forward_backward: gradients of what lies between, at the most.
    """

    entry: int
    attention: int
    feed_forward: int
    attention_backward: int
    feed_forward_backward: int

    @property
    def kept(self) -> int:
        return self.attention + self.feed_forward


def layer_memory(shape: Shape, setting: Setting) -> LayerMemory:
    """Of each of the model's layers."""
    tokens, hidden, inner = setting.tokens, shape.hidden, shape.intermediate
    before, after = _halves(shape)
    scores, scores_backward = _scores(shape, setting)
    attention = hidden * _read(shape, setting) + _inputs(shape, setting, before) + scores
    forward = _feed_forward(shape, setting) + _inputs(shape, setting, after)
    between = stream(setting)
    # What enters an adapter is cast to its 32 bits, and dropped out in them.
    wide = FP32 if setting.adapter.freezes else setting.width
    # Gradients of the stream itself and of what entered the half.
    passing = 3 * hidden * between
    return LayerMemory(
        entry=tokens * hidden * between,
        attention=tokens * (attention + _dropped(shape, setting)),
        feed_forward=tokens * (forward + _dropped(shape, setting)),
        attention_backward=tokens * (scores_backward + passing),
        feed_forward_backward=tokens * (_gates(shape) * inner * wide + passing),
    )


def entry_memory(shape: Shape, setting: Setting) -> int:
    """Bytes that the embeddings keep beside the first layer's input."""
    if not shape.hidden_dropout:
        return 0
    width = stream(setting)
    kept = width if shape.family == "bert" else 0
    return setting.tokens * shape.hidden * (kept + _mask_width(setting, width))


def exit_memory(shape: Shape, setting: Setting) -> int:
    """Bytes that the last norm keeps, and the gradient of the head's input, which the loss has."""
    width = stream(setting)
    if shape.family == "bert":
        kept = width if shape.labels else 3 * width
    else:
        normed = width if shape.family != "gpt2" and not setting.adapter.freezes else 0
        kept = _read(shape, setting) + normed
    return setting.tokens * shape.hidden * kept + gradient_memory(shape, setting)


def gradient_memory(shape: Shape, setting: Setting) -> int:
    """Bytes of the gradient of what enters a language model's head."""
    return 0 if shape.labels else setting.tokens * shape.hidden * stream(setting)


def stream(setting: Setting) -> int:
    """Bytes of a value between layers: those of the embeddings, which autocast leaves alone."""
    return FP32 if setting.casts_weights else setting.width


def _read(shape: Shape, setting: Setting) -> int:
    """Bytes a value that a norm keeps of what it reads: Llama's and its like compute in 32 bits."""
    as_it_comes = shape.family in ("gpt2", "bert") and not setting.adapter.freezes
    return stream(setting) if as_it_comes else FP32


def _halves(shape: Shape) -> tuple[Sequence[Matrix], Sequence[Matrix]]:
    """Matrices that the norms before (or after) attention and feed-forward lead to."""
    names = shape.matrices
    if shape.family == "gpt2":
        return names[:1], names[2:3]
    return names[:3], names[4:-1]


def _inputs(shape: Shape, setting: Setting, readers: Sequence[Matrix]) -> int:
    """Bytes a token that a half's norm and the matrices that read it keep.

    A trained matrix keeps its input: all readers the same values, or under autocast a 16-bit copy
    each. A frozen one keeps nothing, and its adapter what dropout left.
    """
    hidden = shape.hidden
    if setting.adapter.freezes:
        adapted = shape.adapted(setting.adapter.targets)
        return sum(_adapter(matrix, setting) for matrix in adapted if _same_half(matrix, readers))
    normed = hidden * stream(setting) if shape.family not in ("gpt2", "bert") else 0
    return normed + hidden * (2 * len(readers) if setting.casts_weights else setting.width)


def _same_half(matrix: Matrix, readers: Sequence[Matrix]) -> bool:
    """Whether it reads the norm, or what comes of that."""
    return (matrix.name.startswith(("mlp", "intermediate", "output"))) == (
        readers[0].name.startswith(("mlp", "intermediate"))
    )


def _adapter(matrix: Matrix, setting: Setting) -> int:
    """Bytes a token that an adapter keeps: dropout's mask, its result, and the inner values."""
    adapter, entering = setting.adapter, matrix.inputs
    kept = entering * setting.width + adapter.rank * setting.width
    return kept + (entering * _mask_width(setting, FP32) if adapter.dropout else 0)


def _scores(shape: Shape, setting: Setting) -> tuple[int, int]:
    """Bytes a token that attention keeps, and that its backward adds.

    A fused kernel keeps queries, keys, values, its result and a sum a head (Dao et al. 2022,
    "FlashAttention", section 3.1), and the mask as numbers. Where there is none (on a CPU with
    dropout), the scores' softmax, dropout's mask and their product are kept, in 32 bits.
    """
    width, attention = setting.width, shape.attention
    mask = setting.length * width if setting.masked else 0
    if shape.attention_dropout and not setting.cuda:
        table = shape.heads * setting.length * FP32
        return 3 * table + 3 * attention * FP32 + attention * width, table + attention * FP32
    # Grouped keys and values are repeated for each head where there is a mask.
    shared = attention if setting.masked else shape.key_value
    kept = (2 * attention + 2 * shared) * width + shape.heads * FP32 + mask
    return kept, 4 * attention * width


def _feed_forward(shape: Shape, setting: Setting) -> int:
    """Bytes a token, the stream after attention included."""
    inner, width = shape.intermediate, setting.width
    read = shape.hidden * _read(shape, setting)
    # The last product is kept by the matrix that reads it, unless that is frozen.
    last = 0 if setting.adapter.freezes else inner * width
    if shape.family == "bert":
        return read + inner * width + last
    if shape.family == "gpt2":
        # GELU by tanh is four operators; CUDA's autocast takes the power in 32 bits, and what
        # follows (PyTorch's documentation, "CUDA Ops that can autocast to float32").
        wide = FP32 if setting.cuda else width
        cast = inner * FP32 if setting.cuda and setting.casts_weights else 0
        return read + inner * (2 * width + 2 * wide) + cast + last
    return read + 3 * inner * width + last


def _gates(shape: Shape) -> int:
    """Gradients as wide as the feed-forward's inside that live at a time."""
    return 1 if shape.family == "bert" else 2


def _dropped(shape: Shape, setting: Setting) -> int:
    """Bytes a token of the mask of dropout after a half."""
    return shape.hidden * _mask_width(setting, setting.width) if shape.hidden_dropout else 0


def _mask_width(setting: Setting, width: int) -> int:
    """CUDA's dropout keeps a byte a value, a CPU's a factor."""
    return 1 if setting.cuda else width
