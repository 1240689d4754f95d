"""Random changes of training images: the settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from steadytrain.components.techniques.settings import ObjectiveConfig


class ImageAugmentationConfig(ObjectiveConfig):
    """Random changes of training images. Validation images never change."""

    shift: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="Most that an image is moved sideways and up or down, as a share of its size. "
        "0 turns it off.",
    )
    zoom: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Most that an image is enlarged or made smaller, as a share of its size. "
        "0 turns it off.",
    )
    rotation: float = Field(
        0.0, ge=0, le=180, description="Most that an image is turned, in degrees. 0 turns it off."
    )
    flip: Literal["none", "horizontal", "both"] = Field(
        "none",
        description="Which mirror images half of the images are replaced by. both: also top and "
        "bottom, each half of the time. Not for letters, digits and other images with a direction.",
    )
    brightness: float = Field(
        0.0, ge=0, lt=1, description="Most that pixels are made brighter or darker, as a share."
    )
    contrast: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Most that the difference from the mean of the image grows or shrinks, as a "
        "share.",
    )
    erase: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the images in which a rectangle of 2 to 33 % is filled with noise "
        "(Zhong et al. 2017).",
    )

    @property
    def on(self) -> bool:
        return any(value not in (0.0, "none") for value in self.model_dump().values())
