"""Chunk sizes of the fused loss.

Doesn't import torch, because the planner's formulas use it too.
"""

from __future__ import annotations

from typing import Final

from steadytrain.components.shared.errors import BadInput

_VALUES: Final = 2**24
"""Logits per chunk, and values per block of the head's rows: 64 MiB in 32 bits."""
_LEAST_ROWS: Final = 256
"""Smaller chunks underuse the hardware, and each chunk reads and writes the head's gradient."""
_CACHED: Final = 2**18
"""Logits per block, 1 MiB in 32 bits: what fits into the cache of one CPU core."""

_COMPARED: Final = 2**22
"""Logits per block that are compared with a teacher's, or similarities of token states. Either
takes several copies in 32 bits."""
COMPARISON_COPIES: Final = 7
"""The number of those copies at their peak."""

ANSWERED_TOKENS: Final = 4096
"""Tokens of the rows that a teacher answers at once, whose answers are stored."""

QUANTIZED_BLOCK: Final = 64
"""Consecutive values in a row of a quantized head that share a scale."""
HEAD_BITS: Final = {"4bit": 4 + 32 / QUANTIZED_BLOCK, "8bit": 8 + 32 / QUANTIZED_BLOCK}
"""Bits per value of a quantized head, including its share of the 32-bit scale."""

SCORED_TOKENS: Final = 8192
"""Most tokens with padding, unless a row alone has more, that a reference model scores at once."""


def check_head_width(width: int, bits: str) -> None:
    """Reject a head whose rows don't split into blocks that share a scale.

    Args:
        width: values of a token that the head gets.
        bits: `model.adapter.frozen_head`.

    Raises:
        BadInput: the width is no multiple of QUANTIZED_BLOCK.
    """
    if width % QUANTIZED_BLOCK:
        raise BadInput(
            f"model.adapter.frozen_head = {bits!r}: the head takes {width} values, which is not "
            f"a multiple of {QUANTIZED_BLOCK}",
            remedy="leave it out",
        )


def chunk_rows(vocabulary: int) -> int:
    """Return the number of rows of logits per chunk."""
    return max(_LEAST_ROWS, _VALUES // vocabulary)


def comparison_rows(vocabulary: int) -> int:
    """Return the number of rows of logits that are compared with a teacher's at a time."""
    return max(16, _COMPARED // vocabulary)


def answered_rows(length: int) -> int:
    """Return the number of rows that a teacher answers at once.

    Args:
        length: tokens of the longest row.
    """
    return max(1, ANSWERED_TOKENS // max(length, 1))


def answer_bytes(top_k: int) -> int:
    """Return the bytes of a target's stored answer."""
    return 8 * top_k + 4


def similarity_rows(length: int) -> int:
    """Return the number of token states whose similarities with a document are computed at once."""
    return max(1, _COMPARED // length)


def product_rows(width: int) -> int:
    """Return the number of the head's rows per block, for a 16-bit gradient or a quantized head."""
    return max(1, _VALUES // width)


def block_rows(vocabulary: int) -> int:
    """Return the number of a chunk's rows per block when a CPU turns logits into probabilities."""
    return max(1, _CACHED // vocabulary)
