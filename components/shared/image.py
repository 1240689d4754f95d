"""Names of the product's container images, for the version that is installed."""

from __future__ import annotations

from importlib.metadata import version

_VERSION = version("steadytrain")

STEP_IMAGE = f"steadytrain/step:{_VERSION}"
"""For steps that do not train: no torch in it."""

TRAIN_IMAGE = f"steadytrain/train:{_VERSION}"
"""For training, evaluation and registration."""
