"""The splits that a model was trained on, recorded in its own configuration.

A model that starts from another model has seen everything that model has seen. Each training run
adds its split to those of the base, so the gate can recognize a model that may have seen the
records it is evaluated on. Transformers keeps the field wherever the model goes: a folder, a
bucket, a registry.
"""

from __future__ import annotations

from typing import Any, Final

from steadytrain.components.shared.errors import BadInput

FIELD: Final = "steadytrain_splits"
"""In config.json: a list of `DataRecord.split_digest`."""


def splits_of(model: Any) -> list[str]:
    """Return the splits of all training runs behind a model, as recorded in its configuration.

    Raises:
        BadInput: the field has an invalid value.
    """
    found = getattr(getattr(model, "config", None), FIELD, [])
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise BadInput(
            f"model.base: {FIELD} in its config.json is {str(found)[:80]!r}, not a list of digests",
            remedy="restore that field: steadytrain wrote it when it trained the model",
        )
    return found


def add_split(model: Any, split: str) -> None:
    """Record that a model is trained on a split."""
    setattr(model.config, FIELD, sorted({*splits_of(model), split}))
