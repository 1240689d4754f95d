"""Random changes to a training image that keep its class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from steadytrain.components.techniques.image_augmentation import ImageAugmentationConfig

_ENHANCED: Final[Mapping[str, Any]] = {
    "brightness": ImageEnhance.Brightness,
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "sharpness": ImageEnhance.Sharpness,
}
_ERASED: Final = (0.02, 0.33)
"""Least and greatest share of the area."""
_NARROWEST: Final = 0.3
"""Least ratio of the sides of what is erased."""
_RATIO: Final = math.log(4 / 3)
"""Greatest logarithm of the ratio of the sides of what is cut out."""
_TRIES: Final = 10
_STRONGEST: Final = 30
_SIGNED: Final = ("shear_x", "shear_y", "shift_x", "shift_y", "turn", *_ENHANCED)
OPERATIONS: Final = (*_SIGNED, "posterize", "solarize", "autocontrast", "equalize", "identity")
"""The operations of RandAugment. Those before `posterize` go either way."""


def augmented(
    pixels: NDArray[np.uint8], config: ImageAugmentationConfig, random: np.random.Generator
) -> NDArray[np.uint8]:
    """Return changed pixels, of the same shape (height, width, channels)."""
    cut = _cropped(pixels, config.crop, random) if config.crop else pixels
    moved = _moved(cut, config, random)
    if config.flip != "none" and random.random() < 0.5:
        moved = moved[:, ::-1]
    if config.flip == "both" and random.random() < 0.5:
        moved = moved[::-1]
    for _ in range(config.rand_operations):
        operation = OPERATIONS[int(random.integers(len(OPERATIONS)))]
        sign = -1.0 if operation in _SIGNED and random.random() < 0.5 else 1.0
        moved = operated(moved, operation, sign * config.rand_magnitude)
    moved = _lit(moved, config, random)
    if random.random() < config.erase:
        moved = _erased(moved, random)
    return np.ascontiguousarray(moved)


def _cropped(
    pixels: NDArray[np.uint8], least: float, random: np.random.Generator
) -> NDArray[np.uint8]:
    """Cut out a part of the image and enlarge it (Szegedy et al. 2015, "Going Deeper...").

    A part that does not fit is drawn again. If none of ten fits, the image stays whole.
    """
    height, width, _ = pixels.shape
    for _ in range(_TRIES):
        area = random.uniform(least, 1) * height * width
        ratio = math.exp(random.uniform(-_RATIO, _RATIO))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            top, left = random.integers(height - tall + 1), random.integers(width - wide + 1)
            part = _image(pixels[top : top + tall, left : left + wide])
            return _pixels(part.resize((width, height), Image.Resampling.BILINEAR), pixels)
    return pixels


def operated(pixels: NDArray[np.uint8], operation: str, magnitude: float) -> NDArray[np.uint8]:
    """Return the pixels after an operation of RandAugment (Cubuk et al. 2019, section 3).

    Args:
        operation: one of OPERATIONS.
        magnitude: from 0 to 30, or below 0 for the other way. Ranges are those of torchvision.
    """
    image, share = _image(pixels), magnitude / _STRONGEST
    if operation in _ENHANCED:
        edited: Any = _ENHANCED[operation](image).enhance(1 + 0.9 * share)
    elif operation == "posterize":
        edited = ImageOps.posterize(image, 8 - round(4 * share))
    elif operation == "solarize":
        edited = ImageOps.solarize(image, math.ceil(255 * (1 - share)))
    elif operation == "autocontrast":
        edited = ImageOps.autocontrast(image)
    elif operation == "equalize":
        edited = ImageOps.equalize(image)
    elif operation == "turn":
        edited = image.rotate(30 * share)
    elif operation == "identity":
        return pixels
    else:
        lean, far = 0.3 * share, 150 / 331 * share
        back = {
            "shear_x": (1, lean, 0, 0, 1, 0),
            "shear_y": (1, 0, 0, lean, 1, 0),
            "shift_x": (1, 0, -int(far * image.width), 0, 1, 0),
            "shift_y": (1, 0, 0, 0, 1, -int(far * image.height)),
        }[operation]
        edited = image.transform(image.size, Image.Transform.AFFINE, back)
    return _pixels(edited, pixels)


def _image(pixels: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[..., 0])


def _pixels(image: Image.Image, like: NDArray[np.uint8]) -> NDArray[np.uint8]:
    result: NDArray[np.uint8] = np.asarray(image).reshape(like.shape)
    return result


def _moved(
    pixels: NDArray[np.uint8], config: ImageAugmentationConfig, random: np.random.Generator
) -> NDArray[np.uint8]:
    """Shift, zoom and turn about the middle in one step. What comes into view is black."""
    if not (config.shift or config.zoom or config.rotation):
        return pixels
    height, width, _ = pixels.shape
    angle = math.radians(random.uniform(-config.rotation, config.rotation))
    # Twice as large is as likely as half as large.
    scale = math.exp(random.uniform(math.log1p(-config.zoom), -math.log1p(-config.zoom)))
    right, down = random.uniform(-config.shift, config.shift, 2) * (width, height)
    cosine, sine = math.cos(angle) / scale, math.sin(angle) / scale
    x, y = width / 2, height / 2
    # For each pixel of the result, the position in the image that it comes from.
    back = (
        *(cosine, sine, x - cosine * (x + right) - sine * (y + down)),
        *(-sine, cosine, y + sine * (x + right) - cosine * (y + down)),
    )
    image = _image(pixels)
    turned = image.transform(image.size, Image.Transform.AFFINE, back, Image.Resampling.BILINEAR)
    return _pixels(turned, pixels)


def _lit(
    pixels: NDArray[np.uint8], config: ImageAugmentationConfig, random: np.random.Generator
) -> NDArray[np.uint8]:
    if not (config.brightness or config.contrast):
        return pixels
    factor = 1 + random.uniform(-config.contrast, config.contrast)
    light = 1 + random.uniform(-config.brightness, config.brightness)
    mean = float(pixels.mean())
    lit: Any = ((pixels.astype(np.float32) - mean) * factor + mean) * light
    clipped: NDArray[np.uint8] = np.clip(np.rint(lit), 0, 255).astype(np.uint8)
    return clipped


def _erased(pixels: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    height, width, channels = pixels.shape
    area = random.uniform(*_ERASED) * height * width
    ratio = math.exp(random.uniform(math.log(_NARROWEST), -math.log(_NARROWEST)))
    tall = min(height, max(1, round(math.sqrt(area * ratio))))
    wide = min(width, max(1, round(math.sqrt(area / ratio))))
    top, left = random.integers(height - tall + 1), random.integers(width - wide + 1)
    result = pixels.copy()
    noise = random.integers(256, size=(tall, wide, channels), dtype=np.uint8)
    result[top : top + tall, left : left + wide] = noise
    return result
