"""Random changes of training images: the settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from steadytrain.components.shared.effects import IfSet, check_unread
from steadytrain.components.techniques.settings import ObjectiveConfig, Recipe


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

    crop: Annotated[float, IfSet()] = Field(
        0.0,
        ge=0,
        le=1,
        description="Least share of the area that is cut out and enlarged to the whole size, with "
        "sides at ratios from 3:4 to 4:3 (Szegedy et al. 2015). 0 turns it off.",
    )
    rand_operations: Annotated[int, IfSet()] = Field(
        0,
        ge=0,
        le=14,
        description="How many of 14 operations change each image one after the other (RandAugment, "
        "Cubuk et al. 2019). 0 turns it off.",
    )
    rand_magnitude: Annotated[int, IfSet()] = Field(
        9, ge=0, le=30, description="How strong the operations of RandAugment are."
    )

    def check(self, recipe: Recipe) -> None:
        del recipe
        if not self.rand_operations:
            address = "training.image_augmentation"
            switch = f"{address}.rand_operations"
            why, fix = f"without {switch}", f"set {switch}, such as 2"
            check_unread(self, address, ("rand_magnitude",), why, fix)

    @property
    def on(self) -> bool:
        fields = self.model_dump(exclude={"rand_magnitude"}).values()
        return any(value not in (0.0, "none") for value in fields)
