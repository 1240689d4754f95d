"""How image files become the pixels that a model reads."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from steadytrain.components.shared.effects import Effect, IfSet
from steadytrain.components.shared.section import Section

IMAGES: Final = ("image_classification",)
"""The tasks that learn from images."""


class ImagesConfig(Section):
    """The pixels of images: their number, colors and scale."""

    size: Annotated[int, Effect.ROWS, IfSet()] = Field(
        224,
        ge=8,
        le=2048,
        description="Width and height of what the model reads, in pixels. Images are resized to it "
        "when data are prepared. Pretrained models need their own, often 224.",
    )
    color: Annotated[Literal["rgb", "gray"], Effect.ROWS, IfSet()] = Field(
        "rgb", description="Whether the model reads three channels, or one in shades of gray."
    )
    resize: Annotated[Literal["crop", "pad", "stretch"], Effect.ROWS, IfSet()] = Field(
        "crop",
        description="How an image that is not square becomes square. crop: its middle. pad: all of "
        "it, between black bars. stretch: all of it, distorted.",
    )
    interpolation: Annotated[
        Literal["bilinear", "bicubic", "lanczos", "nearest"], Effect.ROWS, IfSet()
    ] = Field(
        "bilinear",
        description="How images are resized. Many pretrained models, such as timm's, have learned "
        "from bicubic ones; a run reports where model.base says another.",
    )
    max_pixels: Annotated[int, IfSet()] = Field(
        100_000_000,
        ge=1,
        le=178_000_000,
        description="Pixels above which a file is quarantined before it is decoded, as a small "
        "file may hold more than the memory does.",
    )
    normalization: Annotated[Literal["data", "model"] | None, Effect.LEARNED, IfSet()] = Field(
        None,
        description="Mean and deviation of each channel, which pixels are scaled by. data: those "
        "of the training side. model: those in model.base's preprocessor_config.json, or timm's "
        "for the model. None means model if model.base has them, and data otherwise.",
    )

    @property
    def channels(self) -> int:
        """The number of channels."""
        return 3 if self.color == "rgb" else 1
