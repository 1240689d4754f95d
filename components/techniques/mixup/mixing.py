"""Mixtures of two texts or images: of embeddings or pixels, and of the losses on their labels.

Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization"; for token embeddings Guo, Mao and
Zhang 2019, "Augmenting Data with Mixup for Sentence Classification" (wordMixup). The partner of a
row comes with the row, so a mixture does not depend on the micro-batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from steadytrain.components.techniques.base import Batch

PARTNER: Final = "partner"
"""In a row: the row that it is mixed with."""
SHARE: Final = "share"
"""In a row: its share in the mixture, from 0 to 1. The rest is its partner's."""
CENTER: Final = "center"
"""In a row of an image: where a rectangle of its partner is put, from 0 to 1 down and sideways;
None if all pixels are mixed."""


def mixed_batch(own: Batch, partners: Batch, shares: Sequence[float], fill: int) -> Batch:
    """Return a micro-batch of mixtures.

    Args:
        own, partners: as for the rows alone and for their partners alone: `input_ids` and
            `attention_mask` (rows, length), `targets` (rows). Their lengths may differ.
        shares: of the rows in the mixtures.
        fill: the padding token.

    Returns:
        Each text as long as the longer of its two: where the row has ended, `input_ids` are its
        partner's. `partner_ids` are the partner's, and `token_shares` (rows, length, 2), float32,
        the share of each of the two, 0 for padding. `partner_targets` and `shares` are (rows).
    """
    length = max(batch["input_ids"].shape[1] for batch in (own, partners))
    ids, partner_ids = (_widened(batch["input_ids"], length, fill) for batch in (own, partners))
    masks = [_widened(batch["attention_mask"], length, 0) for batch in (own, partners)]
    share = torch.tensor(shares, dtype=torch.float32)
    of_both = torch.stack((share, 1 - share), 1)[:, None]
    return {
        "input_ids": torch.where(masks[0] > 0, ids, partner_ids),
        "attention_mask": masks[0] | masks[1],
        "targets": own["targets"],
        "partner_ids": partner_ids,
        "token_shares": torch.stack(masks, 2) * of_both,
        "partner_targets": partners["targets"],
        "shares": share,
    }


def mixed_images(
    own: NDArray[np.uint8],
    partners: NDArray[np.uint8],
    shares: Sequence[float],
    centers: Sequence[tuple[float, float] | None],
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Return images in which rectangles of their partners are put, and how the others are mixed.

    A rectangle (CutMix, Yun et al. 2019) that leaves the image is cut off, so that it counts less.

    Args:
        own, partners: (images, height, width, channels).
        shares, centers: as SHARE and CENTER of the rows.

    Returns:
        The images; the share of their own pixels where pixels are mixed, and the share of their own
        target, both (images).
    """
    result, height, width = own.copy(), own.shape[1], own.shape[2]
    pixels, targets = (np.array(shares, dtype=np.float32) for _ in range(2))
    for index, (share, center) in enumerate(zip(shares, centers, strict=True)):
        if center is None:
            continue
        side = math.sqrt(1 - share)
        tall, wide = int(height * side), int(width * side)
        down, right = int(center[0] * height), int(center[1] * width)
        rows = slice(max(down - tall // 2, 0), min(down + (tall + 1) // 2, height))
        columns = slice(max(right - wide // 2, 0), min(right + (wide + 1) // 2, width))
        result[index, rows, columns] = partners[index, rows, columns]
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        pixels[index], targets[index] = 1, 1 - area / (height * width)
    return result, pixels, targets


@contextlib.contextmanager
def mixing(embedding: Any, batch: Batch) -> Iterator[None]:
    """Mix the embeddings of a micro-batch's texts in every forward pass within this context.

    It comes before other changes of the embeddings. A micro-batch without mixtures changes nothing.

    Args:
        embedding: the part of the model that looks up tokens.
    """
    if "partner_ids" not in batch:
        yield
        return

    def look_up_both(_: object, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (ids,) = inputs
        return (torch.cat((ids, batch["partner_ids"])),)

    def mix(_: object, __: object, found: torch.Tensor) -> torch.Tensor:
        first, second = found.chunk(2)
        share, other_share = batch["token_shares"].split(1, dim=2)
        # Shares stay in 32 bits if the embeddings are in 16.
        mixed: torch.Tensor = first * share + second * other_share
        return mixed.to(found.dtype)

    # One lookup of both, because strategies gather and release the table around it.
    hooks: list[Any] = [
        embedding.register_forward_pre_hook(look_up_both),
        embedding.register_forward_hook(mix, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _widened(values: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    """Return (rows, length) of (rows, shorter)."""
    return torch.nn.functional.pad(values, (0, length - values.shape[1]), value=fill)
