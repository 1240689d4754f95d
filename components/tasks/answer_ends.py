"""Tokens that end what a language model generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def stop_at(model: Any, tokens: Sequence[int]) -> list[int]:
    """Add tokens to those that end the model's answers, in its generation configuration.

    Returns:
        Those that were not among them.
    """
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return []
    known = settings.eos_token_id
    known = [] if known is None else list(known) if isinstance(known, list) else [known]
    added = [token for token in tokens if token not in known]
    if added:
        settings.eos_token_id = [*known, *added]
    return added
