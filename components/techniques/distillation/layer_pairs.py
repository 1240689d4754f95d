"""Which layers of a student and its teacher are compared. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steadytrain.components.shared.errors import BadInput

FIELD: Final = "training.distillation.hidden.layers"


def layer_pairs(
    layers: str | Sequence[tuple[int, int]], student: int, teacher: int
) -> list[tuple[int, int]]:
    """Return the compared layers, of the student and of the teacher; 0 means the embeddings.

    Args:
        layers: as in `HiddenConfig.layers`.
        student, teacher: their numbers of layers.

    Raises:
        BadInput: a layer does not exist, or the depths do not fit together.
    """
    if layers == "last":
        return [(student, teacher)]
    if isinstance(layers, str):
        if teacher % student:
            raise BadInput(
                f"{FIELD} = {layers!r}: the teacher's {teacher} layers are no multiple of the "
                f"student's {student}",
                remedy="use last, or name the layers, such as [[1, 2], [3, 4]]",
            )
        return [(layer, layer * teacher // student) for layer in range(1, student + 1)]
    for own, other in layers:
        for who, layer, count in (("student", own, student), ("teacher", other, teacher)):
            if layer > count:
                raise BadInput(
                    f"{FIELD} = {[list(pair) for pair in layers]}: the {who} has no layer {layer}, "
                    f"only {count}",
                    remedy=f"name layers from 0 (the embeddings) to {count}",
                )
    return sorted(layers)
