"""The tokenizer: the model's own, or byte-level BPE trained on the training side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data import is_template
from steadytrain.components.shared.config.plain import shortened
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.paths import local_path
from steadytrain.components.tasks.encoding.base import TokenizerSettings
from steadytrain.components.tasks.encoding.printed import TEMPLATES
from steadytrain.components.tasks.encoding.tokens import load_tokenizer

SAMPLE_BYTES: Final = 32 << 20
"""Maximum text to train a tokenizer on, by content hash. This limits memory."""

_END, _PAD = "<|endoftext|>", "<|pad|>"


def make_tokenizer(
    origin: Path | None,
    texts: Iterable[str],
    folder: Path,
    settings: TokenizerSettings,
    config: RunConfig,
) -> None:
    """Save the tokenizer of a run. It keeps its chat template if neither run nor task has another.

    Args:
        origin: folder of the tokenizer that the run is given; None trains one.
        texts: what to train it on, read only then.
        config: as `with_template` returns it.
    """
    if origin is not None:
        tokenizer = load_tokenizer(origin)
    else:
        tokenizer = train_tokenizer(texts, settings, vocab_size=config.model.vocab_size)
    default = tokenizer.chat_template or settings.chat_template or None
    tokenizer.chat_template = config.data.chat_template or default
    vocabulary = tokenizer.get_vocab()
    for token in config.model.added_tokens:
        if token in vocabulary:
            raise BadInput(
                f"model.added_tokens has {token!r}, which the tokenizer has already",
                remedy="leave it out",
            )
        # Decoding leaves out special tokens, such as the end of a turn.
        special = token in str(tokenizer.chat_template or "")
        tokenizer.add_tokens(token, special_tokens=special)
    tokenizer.save_pretrained(folder)


def with_template(config: RunConfig) -> RunConfig:
    """Return the configuration with the template that data.chat_template names, or its file.

    What identifies the prepared data is then the template, and not its path.

    Raises:
        BadInput: there is no template in the file, or it is not Jinja.
    """
    given = config.data.chat_template
    if given is None:
        return config
    try:
        text = TEMPLATES.get(given, given)
        if not is_template(text):
            text = local_path(given).read_text(encoding="utf-8")
        why = _fault(text)
    except (OSError, ValueError) as error:
        text, why = given, getattr(error, "strerror", None) or str(error)
    if why:
        raise BadInput(
            f"data.chat_template = {shortened(given)!r} cannot be used: {why}",
            remedy="give a UTF-8 file with a template in Jinja, the template itself, or a name: "
            f"{', '.join(TEMPLATES)}",
        )
    data = config.data.model_copy(update={"chat_template": text})
    return config.model_copy(update={"data": data})


def _fault(text: str) -> str:
    """Return why text is no chat template, or ""."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if not is_template(text):
        return "it has neither {{ nor {%"
    try:
        # It knows the tags of chat templates, such as {% generation %}.
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return ""


def train_tokenizer(texts: Iterable[str], settings: TokenizerSettings, *, vocab_size: int) -> Any:
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
            **({"pair": f"{_END} $A {_END} $B {_END}"} if settings.pairs else {}),
            special_tokens=[(_END, backend.token_to_id(_END))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=_END,
        eos_token=_END,
        unk_token=_END,
        pad_token=_PAD,
        mask_token=settings.mask or None,
        extra_special_tokens=list(settings.special),
    )
