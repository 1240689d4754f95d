"""The tokens that stand for hidden spans of a text."""

from __future__ import annotations

import re
from typing import Any, Final

from steadytrain.components.shared.errors import BadInput

SENTINELS: Final = tuple(f"<extra_id_{number}>" for number in range(100))
"""Those of T5, for tokenizers that are trained."""
_NAMES: Final = (
    re.compile(r"<extra_id_(\d+)>"),
    re.compile(r"<\|reserved_special_token_(\d+)\|>"),
)
"""Names of sentinels: of T5 and of Llama 3."""
LEAST: Final = 2
"""Tokens that a text needs: one to hide, and one to keep."""


def sentinels_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that can stand for a span.

    Raises:
        BadInput: there are none.
    """
    names = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
    for pattern in _NAMES:
        found = {
            int(match[1]): index
            for name, index in names.items()
            if (match := pattern.fullmatch(name))
        }
        if found:
            return tuple(found[number] for number in sorted(found))
    raise BadInput(
        "the tokenizer has no sentinel tokens (such as <extra_id_0>), which data.task denoising "
        "needs",
        remedy="use a tokenizer that has them, or leave model.tokenizer and model.base out",
    )
