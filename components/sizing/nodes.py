"""How many nodes a number of GPUs takes. Commands import it for their help, so it must be quick."""

from __future__ import annotations

from typing import Final

from steadytrain.components.shared.errors import BadInput

IN_A_NODE: Final = 8
"""GPUs of a full node."""
MOST_GPUS: Final = 128
"""The most GPUs that a plan considers."""


def nodes_for(gpus: int) -> tuple[int, int]:
    """Return the nodes for a number of GPUs, and the GPUs of each; zeros for 0.

    Raises:
        BadInput: they do not fill nodes of 8.
    """
    if gpus <= IN_A_NODE:
        return (1, gpus) if gpus else (0, 0)
    if gpus % IN_A_NODE:
        raise BadInput(
            f"--gpu-count {gpus}: above {IN_A_NODE}, GPUs are in nodes of {IN_A_NODE}",
            remedy=f"give a multiple of {IN_A_NODE}, or set compute.nodes and "
            "compute.nproc_per_node",
        )
    return gpus // IN_A_NODE, IN_A_NODE
