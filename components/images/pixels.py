"""Turn image files into arrays of pixels: the preparation that training and serving share.

A model is exported with a copy of this file, so it imports nothing but Pillow and NumPy.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

# Only decoders of common formats: others run programs, or are rarely tested.
_FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
_BOMB = 178_000_000
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")


class Unreadable(ValueError):
    """Why a file is not an image that can be used.

    huge: whether it has too many pixels.
    """

    def __init__(self, message: str, *, huge: bool = False) -> None:
        super().__init__(message)
        self.huge = huge


def decoded(content: bytes, max_pixels: int = _BOMB) -> tuple[Image.Image, str]:
    """Return an image in 8 bits, RGB or gray, and the mode that its file has.

    It is turned as its EXIF data say, what is transparent becomes white, and of an animation the
    first picture is taken.

    Args:
        max_pixels: its size is known before it is decoded, so that a small file cannot fill the
            memory.

    Raises:
        Unreadable: it is broken, too large, or has pixels of another kind.
    """
    if not content:
        raise Unreadable("the file is empty")
    with warnings.catch_warnings():
        # Here, the limit is max_pixels.
        warnings.simplefilter("ignore")
        try:
            return _decoded(content, max_pixels)
        except Unreadable:
            raise
        except Image.DecompressionBombError as error:
            raise Unreadable(f"more than {_BOMB:,} pixels", huge=True) from error
        except MemoryError:
            raise
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            # The name of the stream says nothing.
            raise Unreadable(why.partition(" <_io.")[0]) from error


def _decoded(content: bytes, max_pixels: int) -> tuple[Image.Image, str]:
    with Image.open(io.BytesIO(content), formats=_FORMATS) as opened:
        width, height = opened.size
        if width * height > max_pixels:
            raise Unreadable(f"{width} x {height} pixels", huge=True)
        mode = opened.mode
        opened.load()
        image = ImageOps.exif_transpose(opened)
        if opened.format == "PPM" and mode == "I":
            # Pillow reads the 16 bits of a PGM file into 32, from 0 to 65,535.
            return _eight_bits(image), mode
        return _plain(image), mode


def read(image: Any, settings: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Return the pixels that a model with these settings reads: (height, width, channels)."""
    if isinstance(image, Mapping):
        image = image.get("bytes")
    if isinstance(image, str | Path):
        image = Path(image).read_bytes()
    if isinstance(image, bytes | bytearray | memoryview):
        image, _ = decoded(bytes(image), settings["max_pixels"])
    else:
        image = from_array(image)
    names = ("size", "color", "resize", "interpolation")
    return prepared(image, *(settings[name] for name in names))


def from_array(array: Any) -> Image.Image:
    """Return the image of an array: (height, width), (height, width, 1), 3 or 4 channels, 8 bits.

    Raises:
        Unreadable: it is something else.
    """
    pixels = np.asarray(array)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    whole = pixels.size and np.issubdtype(pixels.dtype, np.integer)
    if pixels.ndim not in (2, 3) or channels not in (1, 3, 4) or not whole:
        raise Unreadable(
            f"an array of {pixels.dtype} with the shape {pixels.shape} is no image: give whole "
            "numbers from 0 to 255, (height, width) or (height, width, channels)"
        )
    if pixels.min() < 0 or pixels.max() > 255:
        raise Unreadable(f"pixels from {pixels.min()} to {pixels.max()} are not from 0 to 255")
    return _plain(Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8)))


def _plain(image: Image.Image) -> Image.Image:
    """Return an image with the mode L or RGB."""
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        return image
    if image.mode in ("1", "L"):
        image = image if "transparency" in image.info else image.convert("L")
    if image.mode in _SIXTEEN_BITS:
        return _eight_bits(image)
    if image.mode in ("I", "F"):
        raise Unreadable(f"its pixels have 32 bits (mode {image.mode}); write 8 or 16 bits")
    if image.mode in ("LA", "PA", "La", "RGBA", "RGBa") or "transparency" in image.info:
        over = image.convert("RGBA")
        white = Image.new("RGBA", over.size, "white")
        blended = Image.alpha_composite(white, over).convert("RGB")
        return blended.convert("L") if image.mode in ("L", "LA", "La") else blended
    return image if image.mode == "L" else image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return the higher 8 of the 16 bits of each pixel."""
    return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))


def prepared(
    image: Image.Image, size: int, color: str, resize: str, interpolation: str = "bilinear"
) -> NDArray[np.uint8]:
    """Return the pixels that a model reads: (size, size, channels).

    Args:
        image: as `decoded` returns it.
        color: "rgb" or "gray".
        resize: "crop" cuts off what is longer than wide, "pad" adds black, "stretch" distorts.
        interpolation: a name of Pillow's Resampling, in lower case.
    """
    sampling = Image.Resampling[interpolation.upper()]
    image = image.convert("RGB" if color == "rgb" else "L")
    width, height = image.size
    if (width, height) == (size, size):
        return _array(image)
    if resize == "pad":
        longest = max(width, height)
        inner = [max(1, round(side * size / longest)) for side in (width, height)]
        canvas = Image.new(image.mode, (size, size))
        corner = ((size - inner[0]) // 2, (size - inner[1]) // 2)
        canvas.paste(image.resize((inner[0], inner[1]), sampling), corner)
        return _array(canvas)
    box = (0.0, 0.0, float(width), float(height))
    if resize == "crop":
        shortest = min(width, height)
        left, top = (width - shortest) / 2, (height - shortest) / 2
        box = (left, top, left + shortest, top + shortest)
    return _array(image.resize((size, size), sampling, box=box))


def _array(image: Image.Image) -> NDArray[np.uint8]:
    array = np.array(image, dtype=np.uint8)
    return array if array.ndim == 3 else array[..., None]
