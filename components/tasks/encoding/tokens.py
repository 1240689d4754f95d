"""Turn text and chats into tokens, mark the tokens to predict, and fit records that exceed a row.

Preprocessing and evaluation share this module, so a model is evaluated on exactly the kind of
targets it was trained on. Nothing here needs torch.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.bounded import bounded
from steadytrain.components.shared.config.data_fields import LongRecords
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.tasks.encoding.fields import Defect
from steadytrain.components.tasks.encoding.messages import chat_of, learned_in, scored_in
from steadytrain.components.tasks.encoding.printed import print_chat

# How much longer a tokenizer makes a text, from what its own file says.
#
# The tokenizers library has no limit of its own: with a normalizer that replaces a letter by a
# million of them, one record takes all memory, and the process ends without an error.

LARGEST_GROWTH: Final = 8
"""Characters that may replace one, and times that a text may be repeated."""
LARGEST_MAPPED: Final = 64
"""Bytes that may replace a character in SentencePiece's table, whose longest entry has 33."""
MOST_ADDED: Final = 4096
"""Characters or tokens that may be added to each text."""


def check_growth(backend: Any, named: str) -> None:
    """Check that a tokenizer does not make texts much longer.

    Args:
        backend: `tokenizers.Tokenizer`.
        named: the tokenizer, for messages.

    Raises:
        BadInput: it does.
    """
    for part, (times, added) in {
        "normalizer": _normalized(_state(backend.normalizer)),
        "post_processor": _processed(_state(backend.post_processor)),
    }.items():
        if times > LARGEST_GROWTH or added > MOST_ADDED:
            how = f"{times:.0f} times as long" if times > LARGEST_GROWTH else f"{added:,.0f} longer"
            raise BadInput(
                f"{named}: the tokenizer's {part} may make a text {how}",
                remedy=f"use a tokenizer that adds at most {MOST_ADDED:,} characters or tokens to "
                f"a text and makes it at most {LARGEST_GROWTH} times as long",
            )


Growth = tuple[float, float]
"""How many times as long a text becomes, and what is added to each."""
_NONE: Final[Growth] = (1.0, 0.0)


def _state(part: Any) -> Mapping[str, Any]:
    """Return a part of a tokenizer as its file has it."""
    content: Mapping[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return content


def _normalized(content: Mapping[str, Any]) -> Growth:
    kind = content.get("type")
    if kind == "Sequence":
        return _in_turn(content["normalizers"], _normalized)
    if kind == "Prepend":
        return 1.0, len(content["prepend"])
    if kind == "Precompiled":
        table = base64.b64decode(content["precompiled_charsmap"] or "")
        # The size of a trie, the trie, and the texts that it leads to.
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        longest = max(map(len, texts))
        return _NONE if longest <= LARGEST_MAPPED else (float(longest), 0.0)
    if kind == "Replace":
        pattern, new = content["pattern"], len(content["content"])
        # A regular expression may match nothing, before each character and at the end.
        return (
            (max(1.0, new / max(1, len(pattern["String"]))), 0.0)
            if "String" in pattern
            else (max(1.0, float(new)), float(new))
        )
    return _NONE


def _processed(content: Mapping[str, Any]) -> Growth:
    kind = content.get("type")
    if kind == "Sequence":
        return _in_turn(content["processors"], _processed)
    if kind != "TemplateProcessing":
        return _NONE
    worst = _NONE
    for name in ("single", "pair"):
        pieces = content[name]
        texts = sum("Sequence" in piece for piece in pieces)
        tokens = content["special_tokens"]
        added = sum(
            len(tokens[piece["SpecialToken"]["id"]]["ids"])
            for piece in pieces
            if "SpecialToken" in piece
        )
        worst = max(worst[0], float(texts)), max(worst[1], float(added))
    return worst


def _in_turn(parts: list[Any], growth: Callable[[Mapping[str, Any]], Growth]) -> Growth:
    """Return the growth by parts that work one after the other."""
    times, added = _NONE
    for part in parts:
        more, also = growth(part)
        times, added = times * more, added * more + also
    return times, added


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document in tokens.

    input_ids: the tokens.
    targets: same length; 1 if the token is predicted from those before it.
    ends: tokens that end a turn of the assistant.
    unprinted: number of messages with each key that the chat template does not print.
    """

    input_ids: list[int]
    targets: list[int]
    ends: frozenset[int] = field(default=frozenset(), compare=False)
    unprinted: Mapping[str, int] = field(default_factory=dict, compare=False)


def load_tokenizer(folder: Path, field: str = "") -> Any:
    """Load a folder's tokenizer as Transformers' fast tokenizer, without running the folder's code.

    Args:
        field: the configuration field that names the folder.

    Raises:
        BadInput: the folder has no readable tokenizer, one that needs its own code, or one that
            makes texts much longer.
    """
    from transformers import PreTrainedTokenizerFast

    named = f"{field}: {folder}" if field else str(folder)
    with foreign(
        f"{named}: no tokenizer can be read there (tokenizer.json, tokenizer_config.json)",
        "give a folder with tokenizer.json and tokenizer_config.json (without custom code: "
        "tokenizer code is never run), or set model.tokenizer",
    ):
        # tokenizer.json is complete in itself, and AutoTokenizer would import torch for it.
        if (folder / "tokenizer.json").is_file():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            from transformers import AutoTokenizer

            # Pass False explicitly. With the default, Transformers asks on stdin whether code may
            # run.
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        # A tokenizer in plain Python has no backend, and its code is Transformers' own.
        if backend := getattr(tokenizer, "backend_tokenizer", None):
            check_growth(backend, named)
        return tokenizer


@functools.lru_cache(maxsize=1)
def cached_tokenizer(folder: Path) -> Any:
    """Return a folder's tokenizer, loaded once for all records that a process encodes."""
    return load_tokenizer(folder)


def encode_text(tokenizer: Any, text: str) -> Encoded:
    """Encode a plain text document: beginning, tokens, end. All but the first token are targets.

    Names of special tokens within the text are encoded as plain text.

    Raises:
        BadInput: the tokenizer has no end-of-text token.
    """
    return encode_texts(tokenizer, [text])[0]


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[Encoded]:
    """Encode many documents at once, as `encode_text` does each."""
    begin, end = text_ends(tokenizer)
    encoded = _plain_tokens(tokenizer, texts)
    return [Encoded([begin, *ids, end], [0] + [1] * (len(ids) + 1)) for ids in encoded]


def _plain_tokens(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of texts, without adding or recognizing special tokens.

    This calls the tokenizers library directly to skip the offsets, which take as long as the
    tokens.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    before, backend.encode_special_tokens = backend.encode_special_tokens, True
    try:
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    finally:
        backend.encode_special_tokens = before
    return [encoding.ids for encoding in encodings]


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] = (),
    first: int = 0,
    *,
    whole: bool = False,
) -> Encoded:
    """Encode a chat with the tokenizer's own template, or DEFAULT_CHAT_TEMPLATE if it has none.

    Targets are the tokens of the assistant's messages: thoughts, content, calls, and the end of
    each turn.

    Args:
        messages: as `message_of` returns them.
        tools: JSON schemas of the tools that the assistant may call.
        first: index of the first message that may have targets.
        whole: whether all tokens but the first are targets, except of messages that are not
            learned.

    Raises:
        BadInput: the template rejects these messages, or does not print all that they say.
    """
    if not tokenizer.chat_template:
        _end_of_text(tokenizer)
    learned = {index for index in learned_in(messages) if index >= first}
    context = {
        index for index, each in enumerate(messages) if whole and not each.get("train", True)
    }
    # Import this first, so that the import does not count toward the limits.
    import transformers.utils.chat_template_utils  # noqa: F401

    with bounded("the tokenizer's chat template"):
        printed = print_chat(tokenizer, messages, tools, learned | context)
    encoded = tokenizer(
        printed.text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)

    def marked(messages: set[int]) -> Encoded:
        spans = [span for index, span in printed.spans.items() if index in messages]
        return _chosen(printed.text, spans, ids, offsets, special)

    chosen = replace(marked(learned), unprinted=printed.unprinted)
    if not whole:
        return chosen
    rest = marked(context).targets
    return replace(chosen, targets=[int(i > 0 and not given) for i, given in enumerate(rest)])


def windows(encoded: Encoded, length: int) -> list[Encoded]:
    """Return consecutive windows of at most `length` tokens (2 or more).

    Neighbors share exactly one token. It is the first context of the later window and a target only
    in the earlier one, so each target is predicted once.
    """
    if length < 2:
        raise ValueError(f"a window of {length} tokens has nothing to predict")
    result = [Encoded(encoded.input_ids[:length], encoded.targets[:length])]
    for start in range(length - 1, len(encoded.input_ids) - 1, length - 1):
        ids, targets = (
            part[start : start + length] for part in (encoded.input_ids, encoded.targets)
        )
        result.append(Encoded(ids, [0, *targets[1:]]))
    return result


def encode_record(tokenizer: Any, record: Mapping[str, Any]) -> Encoded:
    """Encode a raw record with `messages` (a list, or its JSON) or `text`."""
    if record.get("messages") is not None:
        return encode_chat(tokenizer, *chat_of(record["messages"]))
    return encode_text(tokenizer, record["text"])


def scored_text(record: Mapping[str, Any]) -> str:
    """Return the text of a raw record that is predicted, the same for any tokenizer.

    For a chat, it is what the assistant says. Otherwise it is the whole text.
    """
    if record.get("messages") is not None:
        messages, _ = chat_of(record["messages"])
        return "".join(scored_in(messages))
    text: str = record["text"]
    return text


def scored_bytes(record: Mapping[str, Any]) -> int:
    """Return the number of UTF-8 bytes in `scored_text`."""
    return len(scored_text(record).encode())


def text_ends(tokenizer: Any) -> tuple[int, int]:
    """Return the tokens before and after a text. Without a beginning token, both are the end token.

    Raises:
        BadInput: the tokenizer has no end-of-text token.
    """
    end = _end_of_text(tokenizer)
    return (end if tokenizer.bos_token_id is None else tokenizer.bos_token_id), end


def _end_of_text(tokenizer: Any) -> int:
    end: int | None = tokenizer.eos_token_id
    if end is None:
        raise BadInput(
            "the tokenizer has no end-of-text token (eos_token), which a language model needs",
            remedy="use the tokenizer of a causal language model, or set its eos_token",
        )
    return end


def _chosen(
    text: str,
    spans: list[tuple[int, int]],
    ids: list[int],
    offsets: list[tuple[int, int]],
    special: set[int],
) -> Encoded:
    """Mark each token of a span and its end-of-turn token. Spans and tokens are in order.

    A span also includes the special token after it, if only white space is in between.
    """
    targets, kept_tokens = [0] * len(ids), set()
    ends = [index for index, token in enumerate(ids) if token in special]
    token = after = 0
    for start, end in spans:
        while after < len(ends) and offsets[ends[after]][0] < end:
            after += 1
        if after < len(ends):
            low, high = offsets[ends[after]]
            if _blank(text, end, low):
                end = high
                kept_tokens.add(ids[ends[after]])
        while token < len(ids) and max(offsets[token][1], offsets[token][0] + 1) <= start:
            token += 1
        index = token
        while index < len(ids) and offsets[index][0] < end:
            targets[index] = 1
            index += 1
    if targets:
        targets[0] = 0
    return Encoded(ids, targets, frozenset(kept_tokens))


def _blank(text: str, start: int, end: int) -> bool:
    """Return whether a range contains only white space. Stops at the first other character."""
    return not any(not text[index].isspace() for index in range(start, end))


def rows_of(encoded: Encoded, length: int, how: LongRecords | None) -> list[Encoded]:
    """Return the rows of a chat with at least one target.

    Args:
        length: tokens in a row.
        how: `data.long_records`.

    Raises:
        Defect: the chat is left out.
    """
    tokens = len(encoded.input_ids)
    if tokens <= length:
        return [encoded]
    limit = f"data.sequence_length = {length:,}"
    if how == "drop":
        raise Defect("dropped_as_long", f"it has {tokens:,} tokens, more than {limit}")
    if how == "window":
        return list(_windows(encoded, length))
    row = truncated(encoded, length)
    if not any(row.targets):
        prompt = encoded.targets.index(1)
        raise Defect("cut_to_nothing", f"its prompt alone has {prompt:,} tokens, and {limit}")
    return [row]


def truncated(encoded: Encoded, length: int) -> Encoded:
    """Return the first tokens of a document."""
    return Encoded(encoded.input_ids[:length], encoded.targets[:length])


def _windows(encoded: Encoded, length: int) -> Iterator[Encoded]:
    """Yield windows in which each target is predicted once.

    A window begins at most half of its length before its first target, so an answer keeps the end
    of its prompt, and what continues an answer keeps the text before it. The last window has more
    of that, since nothing comes after it.
    """
    end = len(encoded.targets) - encoded.targets[::-1].index(1)
    done = 0
    while done < end:
        first = encoded.targets.index(1, done)
        start = max(0, min(first - length // 2, end - length)) if first >= length else 0
        stop = min(start + length, end)
        targets = [0] * (first - start) + encoded.targets[first:stop]
        yield Encoded(encoded.input_ids[start:stop], targets)
        done = stop
