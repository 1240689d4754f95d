"""The splits that a model was trained with, in its own configuration.

A model that starts from another has seen what that one has seen. Each training adds its split to
those of the base, so that the gate knows a model that may have seen the records it is judged on.
Transformers keeps the field wherever the model goes: a folder, a bucket, a registry.
"""

from __future__ import annotations

from typing import Any, Final

from steadytrain.components.shared.errors import BadInput

FIELD: Final = "steadytrain_splits"
"""In config.json: a list of `DataRecord.split_digest`."""


def splits_of(model: Any) -> list[str]:
    """The splits of all trainings that a model comes from, as far as its configuration tells.

    Raises:
        BadInput: the field holds something else.
    """
    found = getattr(getattr(model, "config", None), FIELD, [])
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise BadInput(
            f"model.base: {FIELD} in its config.json is {str(found)[:80]!r}, not a list of digests",
            remedy="restore that field: steadytrain wrote it when it trained the model",
        )
    return found


def add_split(model: Any, split: str) -> None:
    """Notes that a model is trained with a split."""
    setattr(model.config, FIELD, sorted({*splits_of(model), split}))
