"""The product's own optimizers: AdamW with moments in 32 bits, in 8 bits, and in paged 8 bits."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from steadytrain.components.shared.config import TrainingConfig
from steadytrain.components.shared.config.optimizers import OptimizerSpec, StateTensor

_BLOCK: Final = 256
"""Weights that share a 32-bit constant for each 8-bit moment, in bitsandbytes."""
_UNSUPPORTED: Final = {
    "cpu": "its kernels need a CUDA device",
    "sharding": "bitsandbytes updates complete tensors only",
}


def _settings(training: TrainingConfig) -> dict[str, Any]:
    return {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
    }


def _adamw(groups: list[dict[str, Any]], training: TrainingConfig, *, scaled: bool) -> Any:
    import torch

    # A fused update needs a quarter of the time and no extra memory. With a scaler, it would skip
    # steps inside its kernel, where nothing reports them.
    return torch.optim.AdamW(groups, **_settings(training), fused=not scaled)


def _bitsandbytes(
    kind: str, groups: list[dict[str, Any]], training: TrainingConfig, **_: bool
) -> Any:
    import bitsandbytes.optim

    return getattr(bitsandbytes.optim, kind)(groups, **_settings(training))


def _allocate_8bit(optimizer: Any, parameter: Any) -> None:
    """Allocate as the first update does, since plain tensors would bypass paged memory."""
    optimizer.check_overrides()
    optimizer.initialized = True
    for number, group in enumerate(optimizer.param_groups):
        for place, item in enumerate(group["params"]):
            if item is parameter:
                optimizer.init_state(group, parameter, number, place)


def _moments_8bit(*, paged: bool) -> tuple[StateTensor, ...]:
    return (
        *(StateTensor(name, 1.0, paged=paged) for name in ("state1", "state2")),
        *(StateTensor(name, 4 / _BLOCK, same_shape=False) for name in ("absmax1", "absmax2")),
        *(StateTensor(name, 0.0, same_shape=False) for name in ("qmap1", "qmap2")),
    )


ADAMW: Final = OptimizerSpec(
    build=_adamw,
    tensors=(StateTensor("exp_avg"), StateTensor("exp_avg_sq")),
    scalars=("step",),
    # Unfused, AdamW processes all tensors at once, with an intermediate of the same size
    # (PyTorch's documentation of `foreach`).
    scaled_update_bytes=4.0,
)
ADAMW_8BIT: Final = OptimizerSpec(
    build=partial(_bitsandbytes, "AdamW8bit"),
    tensors=_moments_8bit(paged=False),
    numbers=("step",),
    unsupported=_UNSUPPORTED,
    allocate=_allocate_8bit,
    title="8-bit AdamW",
)
PAGED_ADAMW_8BIT: Final = OptimizerSpec(
    build=partial(_bitsandbytes, "PagedAdamW8bit"),
    tensors=_moments_8bit(paged=True),
    numbers=("step",),
    unsupported=_UNSUPPORTED,
    allocate=_allocate_8bit,
    title="8-bit AdamW",
)
"""Its moments move to host memory when the GPU's runs short (Dettmers et al. 2023, "QLoRA",
section 3)."""
