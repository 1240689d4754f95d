"""Names of steadytrain's container images for the installed version."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from typing import Final

from steadytrain.components.shared.errors import BadInput

REGISTRY_VARIABLE: Final = "STEADYTRAIN_REGISTRY"
"""Registry that the nodes pull images from, such as registry.example.com/team. If unset, they use
their default registry."""
_REGISTRY: Final = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"


def image(kind: str) -> str:
    """Return the full name of the "step" or "train" image.

    Raises:
        BadInput: if STEADYTRAIN_REGISTRY is not the address of a registry.
    """
    registry = os.environ.get(REGISTRY_VARIABLE, "")
    if registry and not re.fullmatch(_REGISTRY, registry):
        raise BadInput(
            f"{REGISTRY_VARIABLE} = {registry!r} is not the address of a registry",
            remedy="give HOST[:PORT][/PATH] without a scheme, a tag or a slash at the end, such as "
            "registry.example.com/team",
        )
    return "/".join(filter(None, [registry, f"steadytrain/{kind}:{version('steadytrain')}"]))


STEP_IMAGE = image("step")
"""Image of the steps that do not train. It has no torch."""

TRAIN_IMAGE = image("train")
"""Image for training, evaluation and registration."""
