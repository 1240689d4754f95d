"""The state of an optimizer that factors second moments: Adafactor (Shazeer and Stern 2018).

Of a matrix it keeps one value for each row and column, and of a vector one for each weight.
"""

from __future__ import annotations

from collections.abc import Iterable

from steadytrain.components.memory.setting import Setting
from steadytrain.components.memory.shape import Shape


def factored_values(shape: Shape, setting: Setting) -> int:
    """Return the number of values that it keeps for the trained parameters.

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
    whole = shape.layers * (in_layer + _of_experts(shape)) + _outside(shape)
    # Frozen parameters may be anywhere; the rest is taken to be like the whole model.
    return whole * (shape.parameters - shape.frozen) // max(shape.parameters, 1)


def _of_experts(shape: Shape) -> int:
    """Return the values for the experts of a layer, whose weights are stacked in few tensors."""
    if not shape.experts:
        return 0
    count = max(1, round(sum(shape.experts) * shape.chosen / max(shape.used, 1)))
    sides = (shape.hidden + size // (count * shape.hidden) for size in shape.experts)
    return count * sum(sides)


def _outside(shape: Shape) -> int:
    words, square = shape.vocabulary, shape.hidden
    found = _split(shape.embeddings, shape.hidden, [words, shape.positions])
    last = shape.labels or (0 if shape.tied else words)
    return found + _split(shape.head, shape.hidden, [last, square])


def _split(values: int, width: int, rows: Iterable[int]) -> int:
    """Return the values for tables of these numbers of rows, and for the rest as vectors."""
    kept = 0
    for count in rows:
        if 0 < count * width <= values:
            kept, values = kept + count + width, values - count * width
    return kept + values
