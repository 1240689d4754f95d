"""The tokenizer: the model's own, or byte-level BPE trained on the training side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from steadytrain.components.tasks.encoding.tokens import DEFAULT_CHAT_TEMPLATE, load_tokenizer

SAMPLE_BYTES: Final = 32 << 20
"""Maximum text to train a tokenizer on, by content hash. This limits memory."""

_END, _PAD = "<|endoftext|>", "<|pad|>"
_ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


def copy_tokenizer(origin: Path, folder: Path, *, task: str) -> None:
    """Save a tokenizer unchanged, except for adding the default chat template if it has none."""
    _save(load_tokenizer(origin), folder, task)


def train_tokenizer(texts: Iterable[str], folder: Path, *, vocab_size: int, task: str) -> None:
    """Train byte-level BPE. The order of the texts does not matter.

    Special tokens: <|endoftext|> starts and ends a text and is the unknown token, <|pad|> pads.
    Chats have one token for each role.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [_END, _PAD, *(_ROLES if task == "supervised_finetuning" else ())]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if task == "sequence_classification":
        # A classifier reads the first or the last token, so add both.
        backend.post_processor = processors.TemplateProcessing(
            single=f"{_END} $A {_END}",
            special_tokens=[(_END, backend.token_to_id(_END))],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=_END,
        eos_token=_END,
        unk_token=_END,
        pad_token=_PAD,
        extra_special_tokens=special[2:],
    )
    _save(tokenizer, folder, task)


def _save(tokenizer: Any, folder: Path, task: str) -> None:
    if task == "supervised_finetuning" and not tokenizer.chat_template:
        tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
