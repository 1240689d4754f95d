"""The portfolio of images, texts, and records with both: networks that PyTorch trains.

Each configuration wins alone: a registered model is one network. They train as many epochs as
`training` says, and the best validation is kept.
"""

from __future__ import annotations

from typing import Any, Final

from steadytrain.components.automl.portfolio import RATE, Family
from steadytrain.components.shared.config import Dimension
from steadytrain.components.shared.config.data_sections import IMAGES, MULTIMODAL, TEXTS

FIRST: Final = 4
"""Configurations of the quality `fast`."""

_AUGMENTATION: Final = "training.image_augmentation"
_DECAY: Final = "training.weight_decay"
_MOVED: Final[dict[str, Any]] = {
    _AUGMENTATION: {"shift": 0.07, "zoom": 0.1, "rotation": 10},
    _DECAY: 0.05,
}
_UNCHANGED: Final[dict[str, Any]] = {_AUGMENTATION: {}, _DECAY: 0.05}
_SPREAD: Final = Dimension(low=1e-3, high=0.3, log=True)
_NETWORK: Final[dict[str, Any]] = {"framework": "pytorch", "max_steps": 0}
_OF_IMAGES: Final = {**_NETWORK, "tasks": IMAGES, "starts": "scratch"}

CONVOLUTIONS = Family(
    config={
        "model_type": "convnext",
        "patch_size": 2,
        "num_stages": 3,
        "layer_scale_init_value": 1.0,
    },
    entries={
        "small convolutional network": (
            4,
            {"hidden_sizes": [16, 32, 64], "depths": [1, 1, 1], RATE: 2e-3, **_MOVED},
        ),
        "convolutional network": (
            1,
            {"hidden_sizes": [32, 64, 128], "depths": [1, 1, 1], RATE: 2e-3, **_MOVED},
        ),
        "convolutional network, unchanged images": (
            3,
            {"hidden_sizes": [32, 64, 128], "depths": [1, 1, 1], RATE: 2e-3, **_UNCHANGED},
        ),
        "deep convolutional network": (
            2,
            {"hidden_sizes": [32, 64, 128], "depths": [2, 2, 2], RATE: 2e-3, **_MOVED},
        ),
    },
    space={RATE: Dimension(low=3e-4, high=1e-2, log=True), _DECAY: _SPREAD},
    seconds=1.5,
    **_OF_IMAGES,
)
RESIDUALS = Family(
    config={
        "model_type": "resnet",
        "layer_type": "basic",
        "embedding_size": 32,
        "hidden_sizes": [32, 64],
        "depths": [2, 2],
    },
    entries={
        "residual network": (0, {RATE: 2e-3, **_MOVED}),
    },
    space={RATE: Dimension(low=3e-4, high=1e-2, log=True), _DECAY: _SPREAD},
    seconds=0.6,
    **_OF_IMAGES,
)
TRANSFORMERS = Family(
    config={
        "model_type": "vit",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "patch_size": 4,
    },
    entries={"vision transformer": (5, {RATE: 1e-3, **_MOVED})},
    space={RATE: Dimension(low=1e-4, high=3e-3, log=True), _DECAY: _SPREAD},
    **_OF_IMAGES,
)
FINE_TUNED_IMAGES = Family(
    config={},
    entries={
        "fine-tuned": (0, {RATE: 1e-4, **_MOVED}),
        "fine-tuned, fast": (1, {RATE: 3e-4, **_MOVED}),
        "fine-tuned, slow": (2, {RATE: 3e-5, **_MOVED}),
        "fine-tuned, unchanged images": (3, {RATE: 1e-4, **_UNCHANGED}),
    },
    space={RATE: Dimension(low=1e-5, high=1e-3, log=True), _DECAY: _SPREAD},
    seconds=7.0,
    tasks=IMAGES,
    starts="base",
    **_NETWORK,
)
FINE_TUNED_TEXTS = Family(
    config={},
    entries={
        "fine-tuned": (0, {RATE: 1e-4, _DECAY: 0.01}),
        "fine-tuned, slow": (1, {RATE: 3e-5, _DECAY: 0.01}),
        "fine-tuned, fast": (2, {RATE: 3e-4, _DECAY: 0.01}),
        "fine-tuned, more decay": (3, {RATE: 1e-4, _DECAY: 0.1}),
    },
    space={RATE: Dimension(low=1e-5, high=1e-3, log=True), _DECAY: _SPREAD},
    seconds=2500.0,
    tasks=TEXTS,
    starts="base",
    **_NETWORK,
)
ENCODERS = Family(
    config={"model_type": "bert", "max_position_embeddings": 2048},
    entries={
        "small encoder": (
            0,
            {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                RATE: 1e-3,
                _DECAY: 0.01,
            },
        ),
        "encoder": (
            1,
            {
                "hidden_size": 128,
                "intermediate_size": 512,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                RATE: 5e-4,
                _DECAY: 0.01,
            },
        ),
    },
    space={RATE: Dimension(low=1e-4, high=5e-3, log=True), _DECAY: _SPREAD},
    seconds=100.0,
    tasks=TEXTS,
    starts="scratch",
    **_NETWORK,
)
FUSED = Family(
    config={},
    entries={
        "fused": (0, {RATE: 3e-4, "model.fusion.width": 128, "model.fusion.dropout": 0.1}),
        "fused, fast": (1, {RATE: 1e-3, "model.fusion.width": 128, "model.fusion.dropout": 0.1}),
        "fused, slow": (2, {RATE: 1e-4, "model.fusion.width": 128, "model.fusion.dropout": 0.1}),
        "fused, fastest": (3, {RATE: 3e-3, "model.fusion.width": 64, "model.fusion.dropout": 0.1}),
        "fused, wide": (4, {RATE: 3e-4, "model.fusion.width": 256, "model.fusion.dropout": 0.3}),
    },
    space={
        RATE: Dimension(low=3e-5, high=5e-3, log=True),
        "model.fusion.width": Dimension(low=32, high=512, log=True),
        "model.fusion.dropout": Dimension(low=0.0, high=0.5),
    },
    seconds=3.5,
    tasks=MULTIMODAL,
    **_NETWORK,
)
