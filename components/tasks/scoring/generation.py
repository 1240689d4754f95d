"""Generate greedy or sampled answers to prompts, in batches, with Transformers' key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from steadytrain.components.tasks.scoring.padding import padding_id

_LOOK_BACK = 2
"""Tokens to search beyond a stop text's own, because text can be tokenized differently."""


@dataclass(frozen=True)
class GenerationRequest:
    """How to generate.

    most: maximum number of new tokens.
    stops: texts before which the answer ends.
    settings: further arguments of `generate`.
    """

    most: int
    stops: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@torch.inference_mode()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    wanted: GenerationRequest,
    *,
    batch_size: int,
    longest: int,
    report: Callable[[int], None],
) -> list[str]:
    """Return what follows each prompt, up to the first stop.

    Args:
        prompts: token ids. Prompts that are too long lose their beginning.
        longest: tokens in the model's context, prompt and answer together.
        report: called with the number of prompts answered so far.
    """
    room = longest - wanted.most
    if room < 1:
        raise ValueError(f"{wanted.most} new tokens leave no room in a context of {longest}")
    cut = [list(prompt[-room:]) for prompt in prompts]
    order = sorted(range(len(cut)), key=lambda index: len(cut[index]), reverse=True)
    found: dict[int, str] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        answers = _batch(model, tokenizer, [cut[index] for index in chosen], wanted)
        found |= zip(chosen, answers, strict=True)
        report(len(found))
    return [found[index] for index in range(len(cut))]


def _batch(
    model: Any, tokenizer: Any, prompts: list[list[int]], wanted: GenerationRequest
) -> list[str]:
    device, fill = next(model.parameters()).device, padding_id(tokenizer)
    width = max(map(len, prompts))
    ids = torch.tensor([[fill] * (width - len(prompt)) + prompt for prompt in prompts])
    lengths = torch.tensor([[len(prompt)] for prompt in prompts])
    mask = (torch.arange(width) >= width - lengths).long()
    stopping = _Stops(tokenizer, wanted.stops, width)
    given = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=wanted.most,
        pad_token_id=fill,
        eos_token_id=tokenizer.eos_token_id,
        stopping_criteria=[stopping] if wanted.stops else None,
        use_cache=True,
        **wanted.settings,
    )
    return [_text(tokenizer, row[width:], wanted.stops) for row in given.tolist()]


def _text(tokenizer: Any, tokens: list[int], stops: Sequence[str]) -> str:
    """Return the text up to its end, without the padding of a finished row."""
    if tokenizer.eos_token_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


class _Stops:
    """Returns which rows of a batch have reached a stop. `generate` calls it after each token."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], begin: int) -> None:
        self._tokenizer, self._stops, self._begin = tokenizer, stops, begin
        sizes = (len(tokenizer.encode(stop, add_special_tokens=False)) for stop in stops)
        self._back = max(sizes, default=0) + _LOOK_BACK

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        last = input_ids[:, max(self._begin, input_ids.shape[1] - self._back) :]
        texts = self._tokenizer.batch_decode(last)
        done = [any(stop in text for stop in self._stops) for text in texts]
        return torch.tensor(done, device=input_ids.device)
