"""What models of images, of Transformers and timm, say about the images that they read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from PIL import Image

from steadytrain.components.shared.config.data_sections import ImagesConfig
from steadytrain.components.shared.errors import BadInput

PROCESSOR: Final = "preprocessor_config.json"
"""Transformers' name of the file with a model's mean and deviation."""
TIMM: Final = "timm_wrapper"
"""Transformers' name of the models of timm."""
_SIDES: Final = ("height", "shortest_edge")


@dataclass(frozen=True)
class Read:
    """How a pretrained model reads images; None where its files don't say.

    origin: the file that says so, for messages.
    """

    origin: str
    mean: Any = None
    deviation: Any = None
    size: int | None = None
    interpolation: str | None = None


def of_folder(folder: Path) -> Read | None:
    """Return how a model's files say that it reads images; None if they don't.

    Raises:
        BadInput: the file is not JSON.
    """
    try:
        if (path := folder / PROCESSOR).is_file():
            return _of_processor(path)
        path = folder / "config.json"
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise BadInput(f"{path} is not JSON: {error}", remedy="restore the file") from error
    pretrained = content.get("pretrained_cfg")
    return _of_timm(str(path), pretrained) if isinstance(pretrained, Mapping) else None


def _of_processor(path: Path) -> Read:
    content = json.loads(path.read_text(encoding="utf-8"))
    # A processor may cut the middle out of what it has resized.
    side = content.get("crop_size") if content.get("do_center_crop") else content.get("size")
    if isinstance(side, Mapping):
        side = next((side[name] for name in _SIDES if name in side), None)
    resample = content.get("resample")
    names = {int(kind): kind.name.lower() for kind in Image.Resampling}
    return Read(
        str(path),
        content.get("image_mean"),
        content.get("image_std"),
        side if isinstance(side, int) else None,
        names.get(resample) if isinstance(resample, int) else None,
    )


def of_architecture(name: str) -> Read | None:
    """Return how timm's pretrained weights of a model read images; None if timm doesn't know."""
    pretrained = _timm().get_pretrained_cfg(name)
    return None if pretrained is None else _of_timm(f"timm's {name}", pretrained.to_dict())


def _of_timm(origin: str, found: Mapping[str, Any]) -> Read:
    mean, deviation = (found.get(name) for name in ("mean", "std"))
    size = found.get("input_size")
    return Read(
        origin,
        list(mean) if isinstance(mean, list | tuple) else mean,
        list(deviation) if isinstance(deviation, list | tuple) else deviation,
        int(size[-1]) if size else None,
        found.get("interpolation"),
    )


def filled(fields: Mapping[str, Any], images: ImagesConfig) -> dict[str, Any]:
    """Return the fields of a new model, with those that the images determine."""
    from transformers import AutoConfig

    if fields["model_type"] == TIMM:
        given = fields.get("model_args") or {}
        return {**fields, "model_args": _timm_inputs(fields["architecture"], images) | given}
    known = AutoConfig.for_model(fields["model_type"]).to_dict()
    of_data = {"image_size": images.size, "num_channels": images.channels}
    return {name: value for name, value in of_data.items() if name in known} | {**fields}


def timms_arguments(folder: Path) -> dict[str, Any]:
    """Return the arguments of a model that timm has saved, as Transformers takes them."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    arguments = content.get("model_args") if "architecture" in content else None
    # timm writes the number of classes twice, and Transformers fails at that.
    dropped = {name: value for name, value in (arguments or {}).items() if name != "num_classes"}
    return {"model_args": dropped} if arguments else {}


def _timm_inputs(architecture: str, images: ImagesConfig) -> dict[str, int]:
    pretrained = _timm().get_pretrained_cfg(architecture)
    fixed = (
        {"img_size": images.size} if pretrained is not None and pretrained.fixed_input_size else {}
    )
    return {"in_chans": images.channels, **fixed}


def check_inputs(model: Any, images: ImagesConfig, field: str = "the model") -> None:
    """Raise BadInput if a model reads images of another size, or with other channels.

    Args:
        field: names the model in errors.
    """
    size, channels = _inputs(model)
    if size not in (None, images.size):
        raise BadInput(
            f"data.images.size = {images.size}: {field} has image_size {size}, and the images "
            f"{images.size}",
            remedy=f"set data.images.size to {size}",
        )
    if channels not in (None, images.channels):
        raise BadInput(
            f"data.images.color = {images.color!r}: {field} has num_channels {channels}, and the "
            f"images {images.channels}",
            remedy="set data.images.color to rgb for three channels, and to gray for one",
        )


def _inputs(model: Any) -> tuple[int | None, int | None]:
    """Return the size and the channels of the images that a model reads; None if it reads any."""
    if model.config.model_type == TIMM:
        given, own = model.config.model_args or {}, model.timm_model.pretrained_cfg
        size = own["input_size"][-1] if own.get("fixed_input_size") else None
        size = given.get("img_size", size)
        return size[-1] if isinstance(size, list) else size, given.get("in_chans", 3)
    sizes = (getattr(model.config, name, None) for name in ("image_size", "num_channels"))
    size, channels = (one if isinstance(one, int) else None for one in sizes)
    return size, channels


def packages(folder: Path) -> list[str]:
    """Return the packages that a saved model needs besides Transformers."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return ["timm"] * (content["model_type"] == TIMM)


def init_like_timm(model: Any) -> None:
    """Draw the weights of a new model of timm as timm does; Transformers draws others."""
    config = model.config
    model.timm_model = _timm().create_model(
        config.architecture,
        pretrained=False,
        # Without a head, it has none already.
        num_classes=config.num_labels if model.timm_model.num_classes else 0,
        **(config.model_args or {}),
    )


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise BadInput(
            "model.config.model_type = 'timm_wrapper': timm is not installed",
            remedy="pip install 'steadytrain[images]'",
        ) from error
    return timm


def note_inputs(model: Any, images: ImagesConfig, mean: Any, deviation: Any) -> None:
    """Write how a model of timm reads images where timm looks for it."""
    if model.config.model_type != TIMM:
        return
    dropped = ("num_classes", "label_names", "label_descriptions", "url", "hf_hub_id", "file")
    inputs = {**model.timm_model.pretrained_cfg}
    model.config.pretrained_cfg = {
        **{name: value for name, value in inputs.items() if name not in dropped},
        "input_size": [images.channels, images.size, images.size],
        "interpolation": images.interpolation,
        "crop_pct": 1.0,
        "mean": list(mean),
        "std": list(deviation),
    }


def differences(read: Read, images: ImagesConfig, field: str) -> Iterator[str]:
    """Yield a sentence for each way in which the data differ from what a model has learned from.

    Args:
        field: names the model.
    """
    for name in ("size", "interpolation"):
        theirs, ours = getattr(read, name), getattr(images, name)
        if theirs not in (None, ours):
            yield (
                f"{field} has learned from images with {name} {theirs} ({Path(read.origin).name}), "
                f"and data.images.{name} is {ours}"
            )


def given_scale(
    images: ImagesConfig, folder: Path | None, fields: Mapping[str, Any]
) -> tuple[list[float], list[float]] | None:
    """Return the mean and deviation of each channel that a model names; None to take the data's.

    Args:
        folder: of the base model; None for a model from scratch.
        fields: of a new model's configuration.

    Raises:
        BadInput: those of the model are asked for, and it has none for these channels.
    """
    asked = images.normalization == "model"
    read = None
    if images.normalization != "data" and folder is not None:
        read = of_folder(folder)
    elif asked and fields["model_type"] == TIMM:
        read = of_architecture(fields["architecture"])
    if read is not None:
        return scale(read, images, "model.config" if folder is None else "model.base")
    if asked:
        raise BadInput(
            "data.images.normalization = 'model': a model from scratch has none"
            if folder is None
            else f"data.images.normalization = 'model': model.base has no {PROCESSOR}",
            remedy="set it to data, or leave it out",
        )
    return None


def scale(read: Read, images: ImagesConfig, field: str) -> tuple[list[float], list[float]]:
    """Return the mean and deviation of each channel that a model's files name.

    Args:
        field: names the model in errors.

    Raises:
        BadInput: they are not one number for each channel.
    """
    normalization = read.mean, read.deviation
    fits = [
        isinstance(each, list)
        and len(each) == images.channels
        and all(isinstance(value, int | float) for value in each)
        for each in normalization
    ]
    if not all(fits):
        raise BadInput(
            f"{field}: image_mean and image_std in {read.origin} are {normalization[0]!r} and "
            f"{normalization[1]!r}, not {images.channels} numbers each",
            remedy="set data.images.normalization to data, or data.images.color to what the model "
            "reads",
        )
    return list(map(float, normalization[0])), list(map(float, normalization[1]))
