"""Image files of every kind become pixels, or say why they do not."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from steadytrain.components.images.pixels import Unreadable, decoded, from_array, prepared

from support.pictures import noise, written

GRAY = noise(1)[0]
COLORS = np.stack([*noise(3, seed=1)], -1)


def pixels(image):
    return np.asarray(image)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_lossless_formats_give_the_same_pixels(kind):
    image, mode = decoded(written(COLORS, kind))
    assert mode == "RGB"
    assert (pixels(image) == COLORS).all()


def test_16_bits_become_8():
    image, mode = decoded(written(Image.fromarray(GRAY.astype(np.uint16) * 256 + 7)))
    assert mode == "I;16"
    assert (pixels(image) == GRAY).all()


@pytest.mark.parametrize("largest", [65535, 4095])
def test_portable_graymaps_with_16_bits_become_8(largest):
    deep = (GRAY.astype(np.uint32) * 256 + 7) * largest // 65535
    content = b"P5\n8 8\n%d\n" % largest + deep.astype(">u2").tobytes()
    image, mode = decoded(content)
    assert (mode, image.mode) == ("I", "L")
    assert (pixels(image) == np.rint(deep / largest * 65535).astype(int) // 256).all()


def test_black_and_white_and_palettes():
    bits = Image.fromarray((GRAY > 127).astype(np.uint8) * 255).convert("1")
    assert (pixels(decoded(written(bits))[0]) == (GRAY > 127) * 255).all()
    palette = Image.fromarray(COLORS).quantize(64)
    image, mode = decoded(written(palette))
    assert mode == "P"
    assert (pixels(image) == pixels(palette.convert("RGB"))).all()


def test_cmyk_becomes_rgb():
    image, mode = decoded(written(Image.fromarray(COLORS).convert("CMYK"), "JPEG", quality=100))
    assert (mode, image.mode) == ("CMYK", "RGB")
    assert np.abs(pixels(image).astype(int) - COLORS).mean() < 20


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_becomes_white(mode):
    image = Image.fromarray(COLORS).convert(mode)
    image.putalpha(Image.fromarray(np.where(GRAY > 127, 255, 0).astype(np.uint8)))
    found, _ = decoded(written(image))
    assert found.mode == mode[:-1]
    assert (pixels(found)[GRAY <= 127] == 255).all()
    expected = pixels(Image.fromarray(COLORS).convert(found.mode))
    assert (pixels(found)[GRAY > 127] == expected[GRAY > 127]).all()


def test_transparent_color_of_a_palette_becomes_white():
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    found, _ = decoded(written(palette, transparency=0))
    assert pixels(found).tolist() == [[[255, 255, 255], [40, 50, 60]]]


def test_image_is_turned_as_its_exif_data_say():
    exif = Image.Exif()
    exif[0x0112] = 6
    image, _ = decoded(written(COLORS, "PNG", exif=exif))
    assert (pixels(image) == np.rot90(COLORS, -1)).all()


def test_first_picture_of_an_animation_is_taken():
    frames = [Image.fromarray(one) for one in noise(3)]
    content = written(frames[0], "GIF", save_all=True, append_images=frames[1:])
    image, _ = decoded(content)
    assert (pixels(image.convert("L")) == pixels(frames[0])).all()


def bomb(side):
    """Return a small PNG that claims to be large."""
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("content", "message", "huge"),
    [
        (b"", "empty", False),
        (b"no image at all", "cannot identify", False),
        (written(COLORS, "JPEG")[:200], "[a-z]", False),
        (bomb(10_001), "10001 x 10001 pixels", True),
        (bomb(60_000), "pixels", True),
        (written(Image.fromarray(GRAY.astype(np.float32)), "TIFF"), "32 bits", False),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot identify", False),
    ],
)
def test_file_that_is_no_image_says_why(content, message, huge):
    with pytest.raises(Unreadable, match=message) as caught:
        decoded(content, 100_000_000)
    assert caught.value.huge == huge
    assert str(caught.value)


def test_file_without_its_end_is_broken():
    whole = written(noise(1, 64)[0])
    with pytest.raises(Unreadable, match="truncated"):
        decoded(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("resize", "columns"), [("crop", slice(4, 12)), ("stretch", None), ("pad", None)]
)
def test_wide_image_becomes_square(resize, columns):
    wide = np.zeros((8, 16), np.uint8)
    wide[:, 4:12] = 200
    found = prepared(Image.fromarray(wide), 8, "gray", resize)
    assert found.shape == (8, 8, 1)
    if columns is not None:
        assert (found[..., 0] == wide[:, columns]).all()
    elif resize == "pad":
        assert (found[:2] == 0).all()
        assert (found[-2:] == 0).all()
        assert found[2:-2].max() > 150
    else:
        assert found[:, 0].max() < 50 < 150 < found[:, 4].min()


def test_thin_image_needs_no_memory_for_its_length():
    found = prepared(Image.new("L", (1, 200_000), 90), 8, "rgb", "crop")
    assert found.shape == (8, 8, 3)
    assert (found == 90).all()


def test_array_is_an_image():
    assert (pixels(from_array(GRAY)) == GRAY).all()
    assert (pixels(from_array(GRAY[..., None].astype(np.int64))) == GRAY).all()
    assert (pixels(from_array(COLORS)) == COLORS).all()


@pytest.mark.parametrize(
    "array",
    [GRAY.astype(np.float32), GRAY[0], np.zeros((8, 8, 2), np.uint8), GRAY.astype(int) * 3, []],
)
def test_array_that_is_no_image_is_refused(array):
    with pytest.raises(Unreadable):
        from_array(array)
