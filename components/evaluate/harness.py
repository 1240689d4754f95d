"""Run a trained model behind lm-eval's interface.

Texts are tokenized exactly as in lm-eval's own `hf` model, so results agree. The scoring of the
tokens is our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, resolve_max_length
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.scoring.continuations import Answer, Continuations, Request
from steadytrain.components.tasks.scoring.padding import padding_id

OnProgress = Callable[[str, int, int], None]
"""Called with the kind of work, the number of requests done, and their total number."""


class Harness(TemplateLM):  # type: ignore[misc]
    """A causal language model with its tokenizer.

    Attributes:
        remarks: what is slower than it could be or differs from what the task asks, one sentence
            each.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, batch_size: int, progress: OnProgress
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.remarks: list[str] = []
        self._model, self._batch_size, self._progress = model, batch_size, progress
        self.max_length = int(resolve_max_length(model.config, tokenizer))
        self._continuations = Continuations(
            model, batch_size=batch_size, longest=self.max_length, fill=padding_id(tokenizer)
        )
        if why := self._continuations.padded:
            self.remarks.append(f"tasks run in padded batches without shared prefixes: {why}")

    @property
    def eot_token_id(self) -> int:
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """Return the token that replaces an empty context: BOS, or EOS if there is no BOS."""
        token = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else int(token)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return self._encode([string], add_special_tokens)[string]

    def _encode(
        self, texts: Iterable[str], add_special_tokens: bool | None = None
    ) -> dict[str, list[int]]:
        """Return tokens by text.

        A text that already starts with the text of the prefix token is tokenized without special
        tokens, unless `add_special_tokens` says otherwise. So the prefix appears only once.
        """
        begin = self.tokenizer.decode(self.prefix_token_id)
        result: dict[str, list[int]] = {}
        unique = list(dict.fromkeys(texts))
        with_bos = [text for text in unique if has_bos_prefix(text, begin)]
        if add_special_tokens is None and with_bos:
            result |= self._encode(with_bos, add_special_tokens=False)
        missing = [text for text in unique if text not in result]
        if missing:
            how = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            ids = self.tokenizer(missing, return_attention_mask=False, verbose=False, **how)
            result |= zip(missing, ids["input_ids"], strict=True)
        return result

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return (nats, greedy) of each request's continuation, given its context."""
        pairs = [_without_space(*request.args) for request in requests]
        texts = (
            text
            for context, continuation in pairs
            if context
            for text in (context, context + continuation)
        )
        with_context = self._encode(texts)
        alone = self._encode(
            (continuation for context, continuation in pairs if not context), False
        )
        asked = []
        for context, continuation in pairs:
            if context:
                begin = with_context[context]
                asked.append(Request(begin, with_context[context + continuation][len(begin) :]))
            else:
                asked.append(self._first(alone[continuation]))
        return self._answers("log-likelihoods", asked)

    def _first(self, tokens: list[int]) -> Request:
        """Build a request for text without context: the prefix token, once, and the text."""
        if tokens[:1] == [self.prefix_token_id]:
            return Request(tokens[:1], tokens[1:])
        return Request([self.prefix_token_id], tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._answers("log-likelihoods", [Request(*request[1:]) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each request's text, in nats.

        Each token counts once, given as much of the text before it as fits in the context.
        """
        texts = [request.args[0] for request in requests]
        tokens = self._encode(texts)
        windows = [
            [
                Request(*make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=tokens[text],
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for text in texts
        ]
        result = iter(
            self._answers("texts", [window for text_windows in windows for window in text_windows])
        )
        return [sum(next(result)[0] for _ in text_windows) for text_windows in windows]

    def _answers(self, what: str, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        for request in requests:
            if not 0 < len(request.continuation) <= self.max_length:
                raise BadInput(
                    f"an lm-eval task asks for a continuation of {len(request.continuation)} "
                    f"tokens, and the model takes 1 to {self.max_length}",
                    remedy="leave that task out of evaluation.tasks, or shorten its answers",
                )
        answers: list[Answer] = self._continuations.answer(
            requests, lambda done: self._progress(what, done, len(requests))
        )
        return [(answer.nats, answer.greedy) for answer in answers]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the text that follows each request's context, up to its stop."""
        alike: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(index)
        encoded = self._encode(request.args[0] for request in requests)
        tokens = {text: ids or [self.prefix_token_id] for text, ids in encoded.items()}
        generated: dict[int, str] = {}

        def report(done: int) -> None:
            self._progress("answers", len(generated) + done, len(requests))

        for members in alike.values():
            answers = generate(
                self._model,
                self.tokenizer,
                [tokens[requests[index].args[0]] for index in members],
                self._wanted(requests[members[0]].args[1]),
                batch_size=self._batch_size,
                longest=self.max_length,
                report=report,
            )
            generated |= zip(members, answers, strict=True)
        return [generated[index] for index in range(len(requests))]

    def _wanted(self, given: dict[str, Any]) -> GenerationRequest:
        """Convert lm-eval's generation settings of a task to those of Transformers."""
        settings = dict(normalize_gen_kwargs(given))
        stops, most = settings.pop("until"), settings.pop("max_gen_toks")
        settings.pop("max_length", None)
        if not settings["do_sample"]:
            settings.pop("temperature", None)
        if most > self.max_length // 2:
            self.remarks.append(
                f"answers end at {self.max_length // 2} tokens instead of {most}: the model's "
                f"context is {self.max_length}"
            )
            most = self.max_length // 2
        return GenerationRequest(most, [stop for stop in stops if stop], settings)


def _without_space(context: str, rest: str) -> tuple[str, str]:
    """Move the spaces at the end of the context to the start of the rest, as tokenizers expect."""
    bare = context.rstrip()
    return (bare, context[len(bare) :] + rest) if bare != context else (context, rest)


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
    generated: dict[int, str] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        answers = _batch(model, tokenizer, [cut[index] for index in chosen], wanted)
        generated |= zip(chosen, answers, strict=True)
        report(len(generated))
    return [generated[index] for index in range(len(cut))]


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
