"""The likelihood of given tokens at given places, without computing all logits at once.

The head runs only at these places, on one part of the vocabulary at a time, so its output stays in
the processor's cache. All logits of a forward pass would need more memory and time than the rest of
the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from steadytrain.components.tasks.eval_mode import eval_mode

_ROWS = 512
_CELLS = {"cpu": 2**19, "cuda": 2**26}
"""Logits per block: 2 MB on a CPU, about the cache of one core."""

Block = Callable[[int, int, int, int], torch.Tensor]
"""Return the logits of places (from, to) and vocabulary entries (from, to)."""


@dataclass(frozen=True)
class TokenTargets:
    """The tokens to score.

    places: (places,), positions among the tokens of the forward pass, row after row.
    of: (tokens,), for each token, the index of its place.
    tokens: (tokens,), the token ids.
    """

    places: torch.Tensor
    of: torch.Tensor
    tokens: torch.Tensor


class Head:
    """The head of one model."""

    def __init__(self, model: Any) -> None:
        self._layer = model.get_output_embeddings()
        # Only the model knows how it changes its logits; only the layer can use quantized weights.
        self._plain = type(self._layer) is torch.nn.Linear and self._gives_logits(model)

    def ask(
        self, targets: TokenTargets, forward: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model on a batch.

        Args:
            forward: returns the batch's logits.

        Returns:
            (tokens,) log-likelihoods, float32, and whether each token is the most likely one.
        """
        kept: list[torch.Tensor] = []

        def select(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> Any:
            states = given[0].flatten(0, 1)[targets.places]
            kept.append(states)
            # One state is enough to run the head, whose output is not used.
            return (states[None, :1] if self._plain else states[None], *given[1:])

        hook = None
        if self._layer is not None:
            hook = self._layer.register_forward_pre_hook(select)
        try:
            logits = forward().flatten(0, 1)
        finally:
            if hook is not None:
                hook.remove()
        if not kept:
            logits = logits[targets.places]
        if not (kept and self._plain):
            return judge(
                targets, logits.shape[-1], lambda top, end, left, right: logits[top:end, left:right]
            )
        states, weight, bias = kept[0], self._layer.weight, self._layer.bias

        def block(top: int, end: int, left: int, right: int) -> torch.Tensor:
            part = None if bias is None else bias[left:right]
            return functional.linear(states[top:end], weight[left:right], part)

        return judge(targets, len(weight), block)

    def _gives_logits(self, model: Any) -> bool:
        """Test the model itself: return whether its logits are its head's unchanged output."""
        given: list[torch.Tensor] = []
        hook = self._layer.register_forward_hook(lambda *call: given.append(call[2]))
        ids = torch.zeros((1, 4), dtype=torch.int64, device=next(model.parameters()).device)
        try:
            with eval_mode(model):
                logits = model(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        return len(given) == 1 and logits is given[0]


def judge(targets: TokenTargets, words: int, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-likelihoods and whether each token is the most likely one, (tokens,).

    The first of equally likely tokens counts as the most likely one, as in `argmax`.

    Args:
        words: size of the vocabulary.
    """
    device = targets.places.device
    width = _CELLS.get(device.type, _CELLS["cuda"]) // _ROWS
    # Sort by place and vocabulary block, so that the tokens of a block are contiguous.
    groups = targets.of // _ROWS * (words // width + 1) + targets.tokens // width
    order = groups.argsort(stable=True)
    nats = torch.empty(len(order), dtype=torch.float32, device=device)
    greedy = torch.empty(len(order), dtype=torch.bool, device=device)
    counts = torch.bincount(groups).tolist()
    begin = 0
    for top in range(0, len(targets.places), _ROWS):
        end = min(top + _ROWS, len(targets.places))
        # Start with a finite value: a block may consist only of impossible tokens (minus infinity).
        highest = torch.full((end - top,), torch.finfo(torch.float32).min, device=device)
        leading = torch.full((end - top,), -1, device=device)
        summed = torch.zeros(end - top, device=device)
        answered = []
        for left in range(0, words, width):
            logits = block(top, end, left, min(left + width, words)).float()
            peak = logits.amax(-1)
            group = top // _ROWS * (words // width + 1) + left // width
            count = counts[group] if group < len(counts) else 0
            if count:
                mine = order[begin : begin + count]
                begin += count
                rows, tokens = targets.of[mine] - top, targets.tokens[mine] - left
                own = logits[rows, tokens]
                best = own == peak[rows]
                best[best.clone()] = logits[rows[best]].argmax(-1) == tokens[best]
                answered.append((mine, rows, own, best, left))
            above = peak > highest
            leading[above] = left
            reached = torch.where(above, peak, highest)
            # Work in place: this block is not used again.
            shares = logits.sub_(reached[:, None]).exp_().sum(-1)
            summed = summed * (highest - reached).exp() + shares
            highest = reached
        for mine, rows, own, best, left in answered:
            # Keep this order: for a certain token, the first difference is exactly 0.
            nats[mine] = (own - highest[rows]) - summed[rows].log()
            greedy[mine] = best & (leading[rows] == left)
    return nats, greedy
