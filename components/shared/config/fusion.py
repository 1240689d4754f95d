"""How the encoders of texts, images and tables become one model."""

from __future__ import annotations

from typing import Final

from pydantic import Field, model_validator

from steadytrain.components.shared.section import PlainJson, Section, at_odds

MULTIMODAL: Final = ("multimodal_classification",)
"""The tasks that learn from texts, images and columns of a table together."""


class FusionConfig(Section):
    """The encoder of images, and the head that reads the outputs of all encoders.

    The encoder of texts is `model.base`, or `model.config` from scratch.
    """

    image: PlainJson = Field(
        default={},
        description="Transformers configuration of the encoder of images, including model_type. "
        "It is trained from scratch; its image size and channels are those of data.images.",
    )
    width: int = Field(
        128,
        ge=4,
        le=8192,
        description="Values that the head reads of each encoder, and its hidden units.",
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout in the head.")

    @model_validator(mode="after")
    def _image_has_a_type(self) -> FusionConfig:
        if self.image and "model_type" not in self.image:
            raise at_odds(
                "model.fusion.image",
                self.image,
                "it has no model_type",
                "give it one, such as convnext or vit",
            )
        return self
