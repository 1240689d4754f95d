"""Give a trained model the tokens that a run adds to its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


@torch.no_grad()
def add_tokens(model: Any, tokenizer: Any, tokens: Sequence[str]) -> None:
    """Give a model rows for new tokens: each is the mean of all tokens that it had before.

    So the other tokens stay almost as likely as they were (Hewitt 2021, "Initializing New Word
    Embeddings for Pretrained Language Models"). Random rows could take all of the probability.

    A model may have more rows than its tokenizer has tokens. New tokens then take some of these.
    """
    new = tokenizer.convert_tokens_to_ids(list(tokens))
    if max(new) >= model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(max(new) + 1, mean_resizing=False)
    head = model.get_output_embeddings()
    tables = [model.get_input_embeddings().weight]
    if head is not None:
        tables += [head.weight, *([] if head.bias is None else [head.bias])]
    for table in tables:
        table[new] = table[: min(new)].float().mean(0).to(table.dtype)
