"""What the model can take, read from its folder without torch, and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.chunks import check_head_width
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_fields import is_template
from steadytrain.components.shared.config.document import shortened
from steadytrain.components.shared.digest import file_digest, value_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.shared.model_source import resolve_model
from steadytrain.components.shared.paths import local_path
from steadytrain.components.shared.remote_code import check_code
from steadytrain.components.tasks.base import load_task
from steadytrain.components.tasks.encoding.base import TokenizerSettings
from steadytrain.components.tasks.encoding.printed import TEMPLATES
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.model_fields import ineffective_fields
from steadytrain.components.techniques.dropout import dropout_fields

_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "camembert", "longformer", "mpnet"}
"""Their position table starts after the padding token's index."""
_WIDTHS = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model")
"""Names of the head's input width; OPT's projection comes before its layers' own width."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
_REMEDY: Final = "give the folder of a model saved by Transformers (save_pretrained)"
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


@dataclass(frozen=True)
class Model:
    """The model that the data is prepared for.

    config: Transformers' configuration, as far as it is given.
    tokenizer: folder of the tokenizer. None means that one will be trained.
    """

    config: dict[str, Any]
    tokenizer: Path | None

    @property
    def vocab_size(self) -> int | None:
        return self._number("vocab_size")

    @property
    def positions(self) -> int | None:
        """Return the longest sequence that the model can take.

        None means that it is not specified.
        """
        result = next(filter(None, map(self._number, _POSITIONS)), None)
        if result is not None and self.config.get("model_type") in _OFFSET_POSITIONS:
            result -= int(self.config.get("pad_token_id", 1)) + 1
        return result

    @property
    def width(self) -> int | None:
        """Return the values of a token that the head gets, or None if that is not specified."""
        return next(filter(None, map(self._number, _WIDTHS)), None)

    @property
    def layers(self) -> int | None:
        """Return the number of layers, or None if that is not specified."""
        return next(filter(None, map(self._number, _LAYERS)), None)

    def tokenizer_digest(self) -> str:
        """Return the digest of the tokenizer's files, or "" if a tokenizer will be trained."""
        if self.tokenizer is None:
            return ""
        files = [self.tokenizer / name for name in _TOKENIZER_FILES]
        return value_digest({path.name: file_digest(path) for path in files if path.is_file()})

    def _number(self, name: str) -> int | None:
        inner = self.config.get("text_config")
        value = self.config.get(name, inner.get(name) if isinstance(inner, dict) else None)
        return value if isinstance(value, int) else None


def find_model(config: RunConfig) -> Model:
    """Return the model of a configuration.

    Raises:
        BadInput: the model needs code that may not run, its folder lacks configuration or weights,
            its tokenizer cannot be read or has different tokens, sequences are too long for it, its
            head is too narrow to quantize, it has no dropout where model.dropout sets it, or its
            configuration asks for a loss that the task does not have; or the teacher of a
            distillation or the reference model of a curriculum is not there, or has other tokens
            than the model with its added ones, or the teacher has too few layers.
    """
    base = resolve_model(config.model.base, config) if config.model.base else None
    named = config.model.tokenizer
    tokenizer = resolve_model(named, config) if named else base
    source = f"model.base: {base / 'config.json'}" if base else "model.config"
    with foreign(f"{source} cannot be used", _REMEDY):
        if base is not None:
            check_code(base, config)
        model = Model(_read_config(base) if base else config.model.config, tokenizer)
        if base is not None:
            _check_loss(config, base, model)
        _check_length(config, model)
        dropout_fields(config.model.dropout, str(model.config.get("model_type")))
        bits = config.model.adapter.frozen_head
        if bits != "as_loaded" and model.width is not None:
            check_head_width(model.width, bits)
    with foreign(
        f"{'model.tokenizer' if named else source} has tokens that cannot be used", _REMEDY
    ):
        _check_vocabulary(config, model, base)
    if config.training.distillation.teacher:
        _check_teacher(config, config.training.distillation.teacher, model)
    if config.training.curriculum.model:
        address = config.training.curriculum.model
        _check_other(config, address, "training.curriculum.model", model)
    return model


def _check_loss(config: RunConfig, base: Path, model: Model) -> None:
    for problem in ineffective_fields(model.config, config.data.task, given=False):
        raise BadInput(
            f"model.base: {base / 'config.json'}: {problem.name} = {problem.value!r}: "
            f"{problem.why}",
            remedy=f"in a copy of the model, {problem.remedy}",
        )


def _check_teacher(config: RunConfig, address: str, model: Model) -> None:
    field = "training.distillation.teacher"
    known = _check_other(config, address, field, model)
    hidden = config.training.distillation.hidden
    if hidden.on and model.layers and known.layers:
        hidden.pairs(model.layers, known.layers)
    size = known.vocab_size
    if not load_task(config.data.task).language_model or size is None:
        return
    top_k = config.training.distillation.top_k or 0
    if top_k > size:
        raise BadInput(
            f"training.distillation.top_k = {top_k}: the teacher has {size} tokens",
            remedy=f"set it to {size} or less",
        )
    if model.vocab_size is not None and size != model.vocab_size:
        raise BadInput(
            f"{field} = {address!r}: it has {size} tokens, and the student {model.vocab_size}",
            remedy="use a teacher and a student with the same vocabulary, such as two sizes of one "
            "family of models",
        )


def _check_other(config: RunConfig, address: str, field: str, model: Model) -> Model:
    """Check that another model can read the rows of this one. Return it."""
    if config.model.added_tokens and address != config.model.base:
        raise BadInput(
            f"{field} = {address!r}: it does not have the tokens of model.added_tokens",
            remedy="leave one of the two out",
        )
    folder = resolve_model(address, config)
    known = Model(_read_config(folder, field), None)
    _check_length(config, known, field)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    with foreign(f"{field}: {folder} has tokens that cannot be used", _REMEDY):
        tokens = load_tokenizer(folder, field).get_vocab() if has_tokenizer else {}
        given = load_tokenizer(model.tokenizer, field).get_vocab() if model.tokenizer else {}
    if any(given.get(token) != index for token, index in tokens.items()):
        raise BadInput(
            f"{field} = {address!r}: its tokens are not those of the model that trains",
            remedy=f"use its tokenizer and a model without one (model.tokenizer={address}), or "
            "a model of the same family",
        )
    return known


def _check_length(config: RunConfig, model: Model, field: str = "the model") -> None:
    if model.positions is not None and config.data.sequence_length > model.positions:
        raise BadInput(
            f"data.sequence_length = {config.data.sequence_length}: {field} takes at most "
            f"{model.positions} tokens",
            remedy=f"set data.sequence_length to {model.positions} or less, or use a model with "
            "more positions",
        )


def _read_config(folder: Path, field: str = "model.base") -> dict[str, Any]:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(
            f"{field}: {folder} has no config.json that can be read", remedy=_REMEDY
        ) from error
    if not isinstance(content, dict):
        raise BadInput(
            f"{field}: {folder / 'config.json'} is a {type(content).__name__}, not a mapping",
            remedy=_REMEDY,
        )
    if not any(True for pattern in _WEIGHTS for _ in folder.glob(pattern)):
        raise BadInput(
            f"{field}: {folder} contains no weights",
            remedy="put model.safetensors next to config.json, or train from scratch with "
            "model.config",
        )
    return content


def _check_vocabulary(config: RunConfig, model: Model, base: Path | None) -> None:
    if model.tokenizer is None:
        size = config.model.vocab_size
    else:
        field = "model.tokenizer" if config.model.tokenizer else "model.base"
        tokenizer = load_tokenizer(model.tokenizer, field)
        size = len(tokenizer)
        tokenizer_folder = (
            base if base is not None and (base / "tokenizer.json").is_file() else None
        )
        if tokenizer_folder is not None and tokenizer_folder != model.tokenizer:
            _check_same_tokens(
                tokenizer.get_vocab(), load_tokenizer(tokenizer_folder, "model.base").get_vocab()
            )
    if base is None:
        size += len(config.model.added_tokens)
    if model.vocab_size is not None and size > model.vocab_size:
        raise BadInput(
            f"the tokenizer has {size} tokens, the model only {model.vocab_size}: "
            "their vocabularies differ",
            remedy="use the model's own tokenizer (leave model.tokenizer out), or give a model "
            "of that vocabulary (model.vocab_size, model.config.vocab_size)",
        )


def _check_same_tokens(given: dict[str, int], own: dict[str, int]) -> None:
    differing = [token for token, index in own.items() if given.get(token) != index]
    if differing:
        raise BadInput(
            f"model.tokenizer: {len(differing)} tokens of the base model's vocabulary (such as "
            f"{differing[0]!r}) are absent or have another index: their vocabularies differ",
            remedy="leave model.tokenizer out, so that the base model's own is used",
        )


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
