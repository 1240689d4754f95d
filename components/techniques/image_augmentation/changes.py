"""Random changes to a training image that keep its class."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steadytrain.components.techniques.image_augmentation import ImageAugmentationConfig

_ERASED: Final = (0.02, 0.33)
"""Least and greatest share of the area."""
_NARROWEST: Final = 0.3
"""Least ratio of the sides of what is erased."""


def augmented(
    pixels: NDArray[np.uint8], config: ImageAugmentationConfig, random: np.random.Generator
) -> NDArray[np.uint8]:
    """Return changed pixels, of the same shape (height, width, channels)."""
    moved = _moved(pixels, config, random)
    if config.flip != "none" and random.random() < 0.5:
        moved = moved[:, ::-1]
    if config.flip == "both" and random.random() < 0.5:
        moved = moved[::-1]
    moved = _lit(moved, config, random)
    if random.random() < config.erase:
        moved = _erased(moved, random)
    return np.ascontiguousarray(moved)


def _moved(
    pixels: NDArray[np.uint8], config: ImageAugmentationConfig, random: np.random.Generator
) -> NDArray[np.uint8]:
    """Shift, zoom and turn about the middle in one step. What comes into view is black."""
    if not (config.shift or config.zoom or config.rotation):
        return pixels
    height, width, channels = pixels.shape
    angle = math.radians(random.uniform(-config.rotation, config.rotation))
    # Twice as large is as likely as half as large.
    scale = math.exp(random.uniform(math.log1p(-config.zoom), -math.log1p(-config.zoom)))
    right, down = random.uniform(-config.shift, config.shift, 2) * (width, height)
    cosine, sine = math.cos(angle) / scale, math.sin(angle) / scale
    x, y = width / 2, height / 2
    # For each place of the result, the place in the image that it comes from.
    back = (
        *(cosine, sine, x - cosine * (x + right) - sine * (y + down)),
        *(-sine, cosine, y + sine * (x + right) - cosine * (y + down)),
    )
    image = Image.fromarray(pixels if channels > 1 else pixels[..., 0])
    turned = image.transform(image.size, Image.Transform.AFFINE, back, Image.Resampling.BILINEAR)
    found: NDArray[np.uint8] = np.asarray(turned).reshape(pixels.shape)
    return found


def _lit(
    pixels: NDArray[np.uint8], config: ImageAugmentationConfig, random: np.random.Generator
) -> NDArray[np.uint8]:
    if not (config.brightness or config.contrast):
        return pixels
    factor = 1 + random.uniform(-config.contrast, config.contrast)
    light = 1 + random.uniform(-config.brightness, config.brightness)
    mean = float(pixels.mean())
    found: Any = ((pixels.astype(np.float32) - mean) * factor + mean) * light
    clipped: NDArray[np.uint8] = np.clip(np.rint(found), 0, 255).astype(np.uint8)
    return clipped


def _erased(pixels: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    height, width, channels = pixels.shape
    area = random.uniform(*_ERASED) * height * width
    ratio = math.exp(random.uniform(math.log(_NARROWEST), -math.log(_NARROWEST)))
    tall = min(height, max(1, round(math.sqrt(area * ratio))))
    wide = min(width, max(1, round(math.sqrt(area / ratio))))
    top, left = random.integers(height - tall + 1), random.integers(width - wide + 1)
    found = pixels.copy()
    noise = random.integers(256, size=(tall, wide, channels), dtype=np.uint8)
    found[top : top + tall, left : left + wide] = noise
    return found
