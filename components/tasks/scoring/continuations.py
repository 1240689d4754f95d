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

from steadytrain.components.tasks.prefix_attention import Tree, attend_by_prefix, row_logits
from steadytrain.components.tasks.prefix_tree import TreeRow, tree_rows
from steadytrain.components.tasks.scoring.table import pad
from steadytrain.components.tasks.scoring.token_targets import Head, TokenTargets

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
    def ask(self, requests: Sequence[Request], report: Report) -> list[Answer]:
        """Return the answers, in the order of the requests."""
        found: list[Answer] = []
        for start in range(0, len(requests), _REQUESTS_AT_ONCE):
            block = requests[start : start + _REQUESTS_AT_ONCE]
            answers: dict[int, Answer] = {}
            for members, part in self._passes(block):
                answers |= zip(members, part, strict=True)
                report(start + len(answers))
            found += (answers[index] for index in range(len(block)))
        return found

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
        nats, greedy = self._head.ask(targets, forward)
        lengths = [len(request.continuation) for request in requests]
        return [
            Answer(float(own.double().sum()), bool(hits.all()))
            for own, hits in zip(
                torch.split(nats.cpu(), lengths), torch.split(greedy.cpu(), lengths), strict=True
            )
        ]
