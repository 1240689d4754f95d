"""A learner's arrays as tensors of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.train.checkpoint.snapshot import Piece, whole_piece
from steadytrain.components.train.checkpoint.tensor_file import is_storable
from steadytrain.components.train.framework.learner import State


def as_pieces(state: State) -> list[Piece]:
    """Return the arrays for a checkpoint. They share memory with `state`.

    Raises:
        BadInput: an array has values that a checkpoint does not hold.
    """
    return [whole_piece(name, _tensor(name, np.asarray(value))) for name, value in state.items()]


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> State:
    """Return the arrays of a checkpoint."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _tensor(name: str, array: np.ndarray) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError):
        pass
    else:
        if is_storable(tensor):
            return tensor
    raise BadInput(
        f"state()[{name!r}] of the learner is an array of {array.dtype}, which a checkpoint does "
        "not hold",
        remedy="use numbers or bool, for example np.frombuffer(data, np.uint8) for bytes",
    )
