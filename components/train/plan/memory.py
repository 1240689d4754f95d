"""What a training needs of a GPU's memory, from a formula: an estimate for people, not a plan."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30

GPUS = (
    ("T4", 16),
    ("L4", 24),
    ("V100", 32),
    ("A100 40 GB", 40),
    ("L40S", 48),
    ("A100 80 GB or H100", 80),
    ("H200", 141),
    ("B200", 180),
)
"""Name and memory in GB, as NVIDIA's data sheet of each states it; the smallest first."""

_USABLE = 0.9
"""Of a GPU's memory; the rest goes to the driver's context and to fragments."""


@dataclass(frozen=True)
class Shape:
    """What the memory of a training depends on.

    tokens: of a micro-batch.
    """

    parameters: int
    tokens: int
    hidden: int
    layers: int
    vocabulary: int


def needed_bytes(shape: Shape, *, recomputing: bool) -> int:
    """Bytes on one GPU with AdamW, nothing sharded.

    16 a parameter: weight 4, gradient 4, AdamW's moments 8 (Rajbhandari et al. 2020, "ZeRO",
    section 3.1, has the same sum for 16-bit weights with a 32-bit copy). Activations of a
    transformer's layer: 34 x tokens x hidden in 16 bits (Korthikanti et al. 2022, "Reducing
    Activation Recomputation", equation 2, attention scores left out since fused kernels do not
    keep them), twice that here for 32 bits; recomputed, each layer keeps its input (4 a value)
    and one at a time has all of them. Logits: 12 x tokens x vocabulary (themselves, their
    softmax and their gradient).
    """
    layer = 68 * shape.tokens * shape.hidden
    kept = 4 * shape.tokens * shape.hidden * shape.layers + layer
    activations = kept if recomputing else layer * shape.layers
    return 16 * shape.parameters + activations + 12 * shape.tokens * shape.vocabulary


def smallest_gpu(needed: int) -> str | None:
    """The first of GPUS whose memory suffices, or None."""
    return next((name for name, size in GPUS if needed <= size * 10**9 * _USABLE), None)


def advice(needed: int) -> str:
    """What `needed` bytes mean, for people; "" where they are not known."""
    if not needed:
        return ""
    gpu = smallest_gpu(needed)
    size = f"{needed / GIB:.1f} GiB" if needed >= GIB / 10 else f"{needed / 2**20:.1f} MiB"
    return f"even with micro-batch 1 and activation checkpointing a rank needs about {size}; " + (
        f"the smallest GPU that would do: {gpu}" if gpu else "no single GPU has that"
    )
