"""The tokenizer: the model's own, or byte-level BPE trained on the training side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from steadytrain.components.tasks.encoding.base import TokenizerSettings
from steadytrain.components.tasks.encoding.tokens import load_tokenizer

SAMPLE_BYTES: Final = 32 << 20
"""Maximum text to train a tokenizer on, by content hash. This limits memory."""

_END, _PAD = "<|endoftext|>", "<|pad|>"


def make_tokenizer(
    origin: Path | None,
    texts: Iterable[str],
    folder: Path,
    settings: TokenizerSettings,
    *,
    vocab_size: int,
) -> None:
    """Save the tokenizer of a run. A given one only gets the task's chat template if it has none.

    Args:
        origin: folder of the tokenizer that the run is given; None trains one.
        texts: what to train it on, read only then.
        vocab_size: of the one to train.
    """
    if origin is not None:
        _save(load_tokenizer(origin), folder, settings)
    else:
        train_tokenizer(texts, folder, settings, vocab_size=vocab_size)


def train_tokenizer(
    texts: Iterable[str], folder: Path, settings: TokenizerSettings, *, vocab_size: int
) -> None:
    """Train byte-level BPE. The order of the texts does not matter.

    Special tokens: <|endoftext|> starts and ends a text and is the unknown token, <|pad|> pads, and
    those of the task.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END, _PAD, *settings.special, *([settings.mask] if settings.mask else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if settings.adds_ends:
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
        mask_token=settings.mask or None,
        extra_special_tokens=list(settings.special),
    )
    _save(tokenizer, folder, settings)


def _save(tokenizer: Any, folder: Path, settings: TokenizerSettings) -> None:
    if settings.chat_template and not tokenizer.chat_template:
        tokenizer.chat_template = settings.chat_template
    tokenizer.save_pretrained(folder)
