"""What the forward pass keeps for the backward pass, counted operator by operator.

The method is from Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4: each operator keeps what its derivative needs. What each of
Transformers' layers keeps under autocast was measured on the live tensors of real steps
(`live_tensors.py`); tests compare the sums with them.
"""

from __future__ import annotations

from steadytrain.components.memory.setting import FP32, Setting
from steadytrain.components.memory.shape import LayerMemory, Matrix, Shape, Traits


def layer_memory(shape: Shape, setting: Setting) -> LayerMemory:
    """Return the memory of each of the model's layers."""
    if shape.traced:
        return shape.traced(setting).layer
    traits = _traits(shape)
    tokens, hidden = setting.tokens, shape.hidden
    before, after = traits.readers
    scores, scores_backward = _scores(shape, setting)
    around = _norms(shape, setting)
    attention = around + _inputs(shape, setting, before, feed_forward=False) + scores
    attention += _heads_norms(shape, setting) + _packed(shape, setting)
    forward = around + _inputs(shape, setting, after, feed_forward=True)
    forward += _feed_forward(shape, setting)
    if traits.attention_dropped:
        attention += _dropped(shape, setting)
    coming = _coming(shape, setting)
    # By then, the norm after the feed-forward is done.
    done = around if traits.placed != "before" and traits.norm != "layer" else 0
    return LayerMemory(
        entry=tokens * hidden * stream(setting),
        attention=tokens * attention,
        feed_forward=tokens * (forward + _dropped(shape, setting)),
        attention_backward=tokens * (scores_backward + coming),
        feed_forward_backward=tokens * (_inside_backward(shape, setting) + coming - done),
    )


def _coming(shape: Shape, setting: Setting) -> int:
    """Return the bytes per token of stream gradients besides the one that enters the layer."""
    traits = _traits(shape)
    if traits.norm == "layer" or not setting.half:
        copies = 1
    else:
        # One more in 32 bits. A norm after the half, and adapters, need another one.
        copies = 2 if traits.placed == "before" and not setting.adapter.freezes else 3
    return copies * shape.hidden * stream(setting)


def entry_memory(shape: Shape, setting: Setting) -> int:
    """Return the bytes that the embeddings keep in addition to the first layer's input."""
    if shape.traced:
        return shape.traced(setting).entry
    width = stream(setting)
    kept = width if _traits(shape).embedding_norm else 0
    dropped = _mask_width(setting, width) if shape.hidden_dropout else 0
    return setting.tokens * shape.hidden * (kept + dropped)


def exit_memory(shape: Shape, setting: Setting) -> int:
    """Return the bytes that the last norm keeps, and the gradient of the head's input."""
    if shape.traced:
        return shape.traced(setting).exit
    width, traits = stream(setting), _traits(shape)
    if traits.norm == "layer" and traits.placed == "after":
        kept = width if shape.labels else 3 * width
    else:
        kept = _read(shape, setting) + _normed(shape, setting, width)
    return setting.tokens * shape.hidden * kept + gradient_memory(shape, setting)


def gradient_memory(shape: Shape, setting: Setting) -> int:
    """Return the bytes of the gradient of a language model head's input."""
    return 0 if shape.labels else setting.tokens * shape.hidden * stream(setting)


def stream(setting: Setting) -> int:
    """Return the bytes of a value between layers: the embeddings' type, which autocast keeps."""
    return FP32 if setting.casts_weights else setting.width


def _traits(shape: Shape) -> Traits:
    assert shape.traits is not None, "a model without a formula is traced"
    return shape.traits


def _read(shape: Shape, setting: Setting) -> int:
    """Return the bytes per value that a norm keeps of its input. Llama-like norms use 32 bits."""
    as_it_comes = _traits(shape).norm == "layer" and not setting.adapter.freezes
    return stream(setting) if as_it_comes else FP32


def _normed(shape: Shape, setting: Setting, width: int) -> int:
    """Return the bytes per value that a norm with trained weights keeps of its result.

    Args:
        width: bytes per value of its input.
    """
    if setting.adapter.freezes:
        return 0
    return {"layer": 0, "rms": width, "rms32": FP32}[_traits(shape).norm]


def _norms(shape: Shape, setting: Setting) -> int:
    """Return the bytes per token that the norms of a half keep."""
    traits = _traits(shape)
    each = shape.hidden * (_read(shape, setting) + _normed(shape, setting, stream(setting)))
    return 2 * each if traits.placed == "both" else each


def _heads_norms(shape: Shape, setting: Setting) -> int:
    """Return the bytes per token that the norms of queries and keys keep."""
    if _traits(shape).heads_normed == "no":
        return 0
    each = FP32 + _normed(shape, setting, setting.width)
    return (shape.attention + shape.key_value) * each


def _packed(shape: Shape, setting: Setting) -> int:
    """Return the bytes per token of packed queries and keys, which stay alive with the values."""
    kept = shape.attention + shape.key_value
    return kept * setting.width if _traits(shape).packed else 0


def _inputs(shape: Shape, setting: Setting, readers: int, *, feed_forward: bool) -> int:
    """Return the bytes per token kept by the matrices that read the stream.

    A trained matrix keeps its input: all readers share the same values, or under autocast each has
    a 16-bit copy. A frozen matrix keeps nothing, and its adapter keeps the result of dropout.
    """
    if setting.adapter.freezes:
        adapted = shape.adapted(setting.adapter.targets)
        return sum(_adapter(m, setting) for m in adapted if _in_feed_forward(m) is feed_forward)
    return shape.hidden * (2 * readers if setting.casts_weights else setting.width)


def _in_feed_forward(matrix: Matrix) -> bool:
    return matrix.name.startswith(("mlp", "intermediate", "output", "ffn"))


def _adapter(matrix: Matrix, setting: Setting) -> int:
    """Return an adapter's bytes per token: dropout's mask, its result, and the inner values."""
    adapter, entering = setting.adapter, matrix.inputs
    kept = entering * setting.width + adapter.rank * setting.width
    return kept + (entering * _mask_width(setting, FP32) if adapter.dropout else 0)


def _scores(shape: Shape, setting: Setting) -> tuple[int, int]:
    """Return the bytes per token that attention keeps, and that its backward adds.

    A fused kernel keeps queries, keys, values, its result and one sum per head (Dao et al. 2022,
    "FlashAttention", section 3.1), and the mask as numbers. Without one (on a CPU with dropout),
    the scores' softmax, dropout's mask and their product are kept, in 32 bits.
    """
    width, attention = setting.width, shape.attention
    mask = setting.length * width if setting.masked else 0
    if shape.attention_dropout and not setting.cuda:
        table = shape.heads * setting.length * FP32
        return 3 * table + 3 * attention * FP32 + attention * width, table + attention * FP32
    # With a mask, grouped keys and values are repeated for each head.
    shared = attention if setting.masked else shape.key_value
    kept = (2 * attention + 2 * shared) * width + shape.heads * FP32 + mask
    return kept, 4 * attention * width


def _feed_forward(shape: Shape, setting: Setting) -> int:
    """Return the bytes per token between the first product and the last one."""
    inner, width, inside = shape.intermediate, setting.width, _traits(shape).inside
    if inside == "experts":
        return _experts(shape, setting)
    # The matrix that reads the last product keeps it, unless the matrix is frozen.
    last = 0 if setting.adapter.freezes else inner * width
    if inside == "plain":
        return inner * width + last
    if inside == "tanh":
        # Tanh GELU is four operators. CUDA's autocast computes the power and what follows in 32
        # bits (PyTorch's documentation, "CUDA Ops that can autocast to float32").
        wide = FP32 if setting.cuda else width
        cast = inner * FP32 if setting.cuda and setting.casts_weights else 0
        return inner * (2 * width + 2 * wide) + cast + last
    return 3 * inner * width + last


def _experts(shape: Shape, setting: Setting) -> int:
    """Return the same for experts; each token passes through the chosen number of them.

    All experts' rows are in one sorted table, so an uneven spread of tokens doesn't matter.
    Autocast doesn't change them. The router's probabilities and the sort order are kept too.
    """
    wide, inner = _expert_width(setting), shape.intermediate
    frozen = setting.adapter.freezes
    rows = (3 if frozen else 4) * inner + (1 if frozen else 2) * shape.hidden
    order = 5 * 8 + FP32
    probabilities = FP32 * shape.experts[0] // (2 * inner * shape.hidden)
    return shape.chosen * (rows * wide + order) + probabilities


def _expert_width(setting: Setting) -> int:
    """Return the bytes of a value that an expert computes with: those of its weights."""
    return FP32 if setting.casts_weights else setting.width


def _inside_backward(shape: Shape, setting: Setting) -> int:
    """Return the bytes per token of gradients inside the feed-forward that exist at a time."""
    inner, inside = shape.intermediate, _traits(shape).inside
    if inside == "experts":
        return shape.chosen * 2 * inner * _expert_width(setting)
    # An adapter's input is cast to its 32 bits, and dropout runs in them.
    wide = FP32 if setting.adapter.freezes else setting.width
    return (1 if inside == "plain" else 2) * inner * wide


def _dropped(shape: Shape, setting: Setting) -> int:
    """Return the bytes per token of the dropout mask after a half."""
    return shape.hidden * _mask_width(setting, setting.width) if shape.hidden_dropout else 0


def _mask_width(setting: Setting, width: int) -> int:
    """Return the mask's bytes per value: CUDA's dropout keeps one byte, a CPU's keeps a factor."""
    return 1 if setting.cuda else width


def plain_loss(shape: Shape, setting: Setting) -> int:
    """Return the bytes of a complete micro-batch's logits and of what is computed from them."""
    if shape.traced:
        return shape.traced(setting).loss
    return 0
