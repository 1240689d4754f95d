"""The mixture of a model's parts: how often each is drawn, by its rows or by weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from steadytrain.components.shared.class_names import part_indices
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.techniques import order
from steadytrain.components.techniques.multi_task import MultiTaskConfig
from steadytrain.components.techniques.order import Mixture, largest_remainder


def mixture_of(
    labels: npt.NDArray[np.int32], names: Sequence[str], config: MultiTaskConfig, seed: int
) -> Mixture:
    """Return the configured mixture.

    Args:
        labels: (rows,), the class of each row.
        names: of the classes.

    Raises:
        BadInput: a part's share is so small that it would never be drawn.
    """
    parts, owners = part_indices(names)
    of_rows = np.asarray(owners)[labels]
    sizes = np.bincount(of_rows, minlength=len(parts))
    shares = shares_of(dict(zip(parts, sizes.tolist(), strict=True)), config)
    for name, count in zip(parts, largest_remainder(shares, order.BLOCK), strict=True):
        if not count:
            raise BadInput(
                f"training.multi_task.sampling = {config.sampling!r}: the part {name!r} has a "
                f"share below 1 in {order.BLOCK}",
                remedy="give it a larger weight, raise the temperature, or leave it out",
            )
    return Mixture(of_rows, shares, seed)


def shares_of(sizes: Mapping[str, int], config: MultiTaskConfig) -> npt.NDArray[np.float64]:
    """Return how often each part is drawn, (parts,).

    Args:
        sizes: rows of each part.
    """
    if config.sampling == "weights":
        weights = np.array([config.sampling_weights[name] for name in sizes])
    else:
        power = 1 / config.temperature if config.sampling == "temperature" else 1.0
        weights = np.array([float(size) for size in sizes.values()]) ** power
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares
