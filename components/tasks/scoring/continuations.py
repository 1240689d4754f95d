"""The likelihood of given continuations of given contexts under a language model.

Requests with a common prefix share it: a question with four choices needs its context only once.
The rest is in rows without padding, and the head runs only where tokens are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from steadytrain.components.tasks.prefix_attention import (
    Tree,
    TreeRow,
    attend_by_prefix,
    row_logits,
    tree_rows,
)
from steadytrain.components.tasks.scoring.padding import pad
from steadytrain.components.techniques.modules import eval_mode

# The likelihood of given tokens at given places, without computing all logits at once.
#
# The head runs only at these places, on one part of the vocabulary at a time, so its output stays
# in the processor's cache. All logits of a forward pass would need more memory and time than the
# rest of the model.

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

    def answer(
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
    # Sort by position and vocabulary block, so that the tokens of a block are contiguous.
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
                chosen_logits = logits[rows, tokens]
                best = chosen_logits == peak[rows]
                best[best.clone()] = logits[rows[best]].argmax(-1) == tokens[best]
                answered.append((mine, rows, chosen_logits, best, left))
            above = peak > highest
            leading[above] = left
            reached = torch.where(above, peak, highest)
            # Work in place: this block is not used again.
            shares = logits.sub_(reached[:, None]).exp_().sum(-1)
            summed = summed * (highest - reached).exp() + shares
            highest = reached
        for mine, rows, chosen_logits, best, left in answered:
            # Keep this order: for a certain token, the first difference is exactly 0.
            nats[mine] = (chosen_logits - highest[rows]) - summed[rows].log()
            greedy[mine] = best & (leading[rows] == left)
    return nats, greedy


Report = Callable[[int], None]
"""Called with the number of requests answered so far."""

_ROW_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Tokens per forward pass.

With more, a layer's data outgrows a CPU's cache. A GPU needs more work at a time.
"""
_REQUESTS_AT_ONCE = 20_000  # sorted together; limits memory


@dataclass(frozen=True)
class Request:
    """context, continuation: token ids, at least one each."""

    context: Sequence[int]
    continuation: Sequence[int]

    def inputs(self, longest: int) -> list[int]:
        """Return the model's input: all but the last token, cut on the left to `longest` tokens."""
        return [*self.context, *self.continuation][:-1][-longest:]


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    nats: log-likelihood of the continuation.
    greedy: whether each of its tokens is the most likely one.
    """

    nats: float
    greedy: bool


def _targets(
    places: Sequence[npt.NDArray[np.int64]], requests: Sequence[Request], device: torch.device
) -> TokenTargets:
    """Combine requests. `places` holds, for each one, the places of its continuation's tokens.

    Requests may share places.
    """
    rows, of = np.unique(np.concatenate(places), return_inverse=True)
    tokens = np.concatenate([np.asarray(item.continuation, dtype=np.int64) for item in requests])
    return TokenTargets(*(torch.from_numpy(item).to(device) for item in (rows, of, tokens)))


class Continuations:
    """Sends requests to one model.

    Attributes:
        padded: why it uses padded batches and shares no prefixes. Empty means that it does share.
    """

    def __init__(self, model: Any, *, batch_size: int, longest: int, fill: int) -> None:
        """batch_size: sequences per padded batch. longest: tokens. fill: the padding token."""
        self._model = model.eval()
        self._batch_size, self._longest, self._fill = batch_size, longest, fill
        self._head = Head(model)
        self._device = next(model.parameters()).device
        self._row_tokens = _ROW_TOKENS.get(self._device.type, _ROW_TOKENS["cuda"])
        self.padded = attend_by_prefix(model, model.get_input_embeddings().num_embeddings)

    @torch.inference_mode()
    def answer(self, requests: Sequence[Request], report: Report) -> list[Answer]:
        """Return the answers, in the order of the requests."""
        result: list[Answer] = []
        for start in range(0, len(requests), _REQUESTS_AT_ONCE):
            block = requests[start : start + _REQUESTS_AT_ONCE]
            answers: dict[int, Answer] = {}
            for members, part in self._passes(block):
                answers |= zip(members, part, strict=True)
                report(start + len(answers))
            result += (answers[index] for index in range(len(block)))
        return result

    def _passes(self, requests: Sequence[Request]) -> Iterator[tuple[list[int], list[Answer]]]:
        """Yield the indices of requests and their answers, one forward pass at a time."""
        inputs = [request.inputs(self._longest) for request in requests]
        if not self.padded:
            for row in tree_rows(inputs, self._row_tokens):
                yield row.members, self._of_row(row, [requests[index] for index in row.members])
            return
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index]), reverse=True)
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            batch = [inputs[index] for index in chosen]
            yield chosen, self._of_batch(batch, [requests[index] for index in chosen])

    def _of_row(self, row: TreeRow, requests: Sequence[Request]) -> list[Answer]:
        places = [
            own[len(own) - len(request.continuation) :]
            for own, request in zip(row.places, requests, strict=True)
        ]
        targets = _targets(places, requests, self._device)
        tree = Tree(row, self._device)
        return self._answers(targets, requests, lambda: row_logits(self._model, row, tree))

    def _of_batch(self, batch: list[list[int]], requests: Sequence[Request]) -> list[Answer]:
        ids, mask = pad(batch, self._fill)
        places = [
            np.arange(len(own) - len(request.continuation), len(own)) + index * ids.shape[1]
            for index, (own, request) in enumerate(zip(batch, requests, strict=True))
        ]
        targets = _targets(places, requests, self._device)
        given = {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)}
        return self._answers(
            targets, requests, lambda: self._model(**given, use_cache=False).logits
        )

    def _answers(
        self,
        targets: TokenTargets,
        requests: Sequence[Request],
        forward: Callable[[], torch.Tensor],
    ) -> list[Answer]:
        nats, greedy = self._head.answer(targets, forward)
        lengths = [len(request.continuation) for request in requests]
        return [
            Answer(float(own.double().sum()), bool(hits.all()))
            for own, hits in zip(
                torch.split(nats.cpu(), lengths), torch.split(greedy.cpu(), lengths), strict=True
            )
        ]
