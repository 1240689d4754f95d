"""What training for text tasks shares: a tokenizer, and heads on whole texts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from steadytrain.components.shared.arrow_files import TEXT
from steadytrain.components.shared.class_names import folded, have_parts, indices_of, listed, named
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import Batch, Part, Row
from steadytrain.components.tasks.encoding.labeled_text import TYPES
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.loaded_weights import (
    in_inner_head,
    inner_heads,
    new_weights,
    resized_weights,
)
from steadytrain.components.tasks.models import build
from steadytrain.components.tasks.scoring.padding import pad, token_types
from steadytrain.components.techniques.text_augmentation.changes import augmented, generator_of


class TextTraining(Part):
    """Training of a Transformers model on rows of tokens.

    task: the built-in task whose other parts go with it. So a subclass is enough for `data.task`.
    auto: Transformers' class that loads the model.
    """

    task: str
    auto: str
    metric = "loss"
    greater_is_better = False

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.data.path(self.data.tokenizer))

    @property
    def pad_token_id(self) -> int:
        """Return the padding token.

        If there is none, any token works, because padding is masked.
        """
        padding: int | None = self.tokenizer.pad_token_id
        return (self.tokenizer.eos_token_id or 0) if padding is None else padding

    def cost(self, row: Row) -> int:
        return len(row["input_ids"])

    def build_model(self) -> torch.nn.Module:
        raise NotImplementedError

    def load_reference(self, address: str, field: str) -> torch.nn.Module:
        import transformers

        from steadytrain.components.tasks.models import load_frozen

        auto = getattr(transformers, self.auto)
        return load_frozen(auto, address, field, self.config, self.data, self.tokenizer)

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        del model
        return ()


class LanguageModelTraining(TextTraining):
    """Trains a model that predicts tokens. Its loss is a mean over tokens."""

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss = sums["loss"] / max(sums["weight"], 1)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


R_DROP: Final = "training.r_drop.weight"


def check_drops(model: torch.nn.Module, field: str, value: object) -> None:
    """Check that two passes of a model differ by their dropout.

    Args:
        field, value: what needs the dropout.

    Raises:
        BadInput: the model has no dropout.
    """
    if not drops(model):
        raise BadInput(
            f"{field} = {value}: the model has no dropout, so both passes would be equal",
            remedy="set model.dropout, or leave it out",
        )


def drops(model: torch.nn.Module) -> bool:
    """Return whether any part of a model drops anything."""
    return any(_drops(module) for module in model.modules())


def _drops(module: torch.nn.Module) -> bool:
    """Return whether a module is a dropout layer, or attention with its own share of dropout."""
    share: Any = module.p if isinstance(module, torch.nn.Dropout) else 0.0
    dropout: Any = getattr(module, "attention_dropout", 0.0)
    return share > 0 or (isinstance(dropout, float) and dropout > 0)


class TextHead(TextTraining):
    """Training of Transformers' sequence classifiers, of which regressors are one kind.

    Rows have `input_ids` (int32) and `label`, as `TargetedTextEncoder.target` says; those of pairs
    also `token_type_ids`. It offers the model (`build_headed`), the text of each row, which may be
    augmented (`draw`), the weight of a micro-batch, and the models that rows are compared with
    (`load_reference`). With them come `padded_inputs`, `head_output` and `head_logits`.

    A subclass adds `build_model`, `collate` with the `targets`, a tensor with one row for each row
    of the micro-batch, the losses and the validation metrics.
    """

    auto = "AutoModelForSequenceClassification"
    padded = "input_ids"

    def build_headed(self, labels: Sequence[str], problem_type: str) -> torch.nn.Module:
        """Return the model with a head for the labels; its rows may be those of model.base.

        Args:
            problem_type: the kind of target, as Transformers names it.
        """
        from transformers import AutoModelForSequenceClassification

        return build(
            AutoModelForSequenceClassification,
            self.config,
            self.data,
            self.tokenizer,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            problem_type=problem_type,
            # Decoders use it to find the last token of a text.
            pad_token_id=self.pad_token_id,
        )

    def load_reference(self, address: str, field: str) -> torch.nn.Module:
        model = super().load_reference(address, field)
        # With another padding token than the batches, decoders would read padding.
        model.config.pad_token_id = self.pad_token_id  # type: ignore[union-attr]
        return model

    def draw(self, row: Row, position: int, *, training: bool) -> Row:
        """Return the row with the tokens of an augmented text, which its position decides."""
        config = self.config.training
        if not (training and config.augmentation.on):
            return row
        random = generator_of(config.seed, f"augmentation {position}")
        text = augmented(row[TEXT], config.augmentation, random)
        ids = self._tokens(text) if text != row[TEXT] else ()
        return {**row, "input_ids": ids} if len(ids) else row

    def _tokens(self, text: str) -> Sequence[int]:
        """Return a text's tokens, as preprocessing does."""
        encoded = self.tokenizer(
            text, truncation=True, max_length=self.data.sequence_length, verbose=False
        )
        ids: list[int] = encoded["input_ids"]
        return ids

    def weight(self, batch: Batch) -> int:
        return len(batch["targets"])


def padded_inputs(rows: Sequence[Row], pad_token_id: int) -> Batch:
    """Return the inputs of a micro-batch of rows, padded to the longest."""
    ids, mask = pad([row["input_ids"] for row in rows], pad_token_id)
    batch = {"input_ids": ids, "attention_mask": mask}
    if TYPES in rows[0]:
        batch |= token_types([row[TYPES] for row in rows])
    return batch


def head_output(model: torch.nn.Module, batch: Batch, *, states: bool = False) -> Any:
    """Return what Transformers' model returns for a micro-batch.

    Args:
        states: whether that includes the states of all layers.
    """
    extra = {"output_hidden_states": True} if states else {}
    names = ("input_ids", "attention_mask", TYPES)
    inputs = {name: batch[name] for name in names if name in batch}
    return model(**inputs, **extra)


def head_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the outputs (rows, labels) of the head for a micro-batch, float32."""
    logits: torch.Tensor = head_output(model, batch).logits.float()
    return logits


def class_head(model: Any) -> tuple[str, torch.nn.Linear]:
    """Return the name and the layer.

    Raises:
        BadInput: the model has no such layer outside of its encoder or decoder, or has several.
    """
    if len(heads := inner_heads(model)) > 1:
        raise BadInput(
            f"the model has several heads: {', '.join(heads)}", remedy="use a model with one"
        )
    inner = f"{model.base_model_prefix}."
    result = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is torch.nn.Linear
        and layer.out_features == model.config.num_labels
        and (not name.startswith(inner) or in_inner_head(model, name))
    ]
    if not result:
        raise BadInput(
            f"{type(model).__name__} has no linear layer for its {model.config.num_labels} labels",
            remedy="use a classifier of Transformers with a linear head",
        )
    return result[-1]


def class_names(folder: Path) -> list[str]:
    """Return the classes that a model's config.json names, in the order of its logits."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    labels = content.get("id2label")
    if isinstance(labels, Mapping):
        return [str(labels[key]) for key in sorted(labels, key=int)]
    if isinstance(names := content.get("label_names"), list):
        return [str(name) for name in names]  # As timm's models name them.
    # Transformers' own names, which it does not write for two classes.
    return [
        f"LABEL_{index}"
        for index in range(content.get("num_labels") or content.get("num_classes") or 2)
    ]


def fit_head(model: Any, names: Sequence[str], labels: Sequence[str]) -> str:
    """Make the head of a base model one for the labels of the data.

    Its rows move with the names of their classes. If only some classes are the same, the head gets
    new weights. If none are, the names may be two names for one thing, so the rows stay.

    Args:
        names: the base model's classes, in the order of the rows.

    Returns:
        A sentence about what happened; "" if nothing did, or if the base model has no head.

    Raises:
        BadInput: the rows would have to move, and the model has no linear head.
    """
    of_base, of_data = listed(names), listed(labels)
    if _is_outside(model, resized_weights(model)):
        return (
            f"the head is new, because model.base has {len(names)} classes ({of_base}) and the "
            f"data {len(labels)} ({of_data})"
        )
    if has_new_head(model) or list(names) == list(labels):
        return ""
    places = indices_of(labels, names)
    if places == sorted(range(len(labels))):
        return ""
    if places is not None:
        _move_rows(model, places, "model.base", names, labels)
        return (
            f"the classes of model.base are {of_base}; the rows of its head are now in the order "
            f"of the data: {of_data}"
        )
    parts = have_parts(names) or have_parts(labels)
    shared = {*map(folded, names)} & {*map(folded, labels)}
    if parts or shared or len(names) != len(labels):
        renew_head(model)
        return f"the head is new: the classes of model.base are {of_base}, and the data's {of_data}"
    why = "has other names for its classes" if named(names) else "does not name its classes"
    pairs = [f"{name} = {label}" for name, label in zip(names, labels, strict=True)]
    return (
        f"model.base {why}, so its head is used in its order: {listed(pairs)}; if that is wrong, "
        "set data.labels in the order of model.base"
    )


def order_rows(model: Any, labels: Sequence[str], field: str) -> None:
    """Put the head of a classifier that only answers in the order of the labels, if it has these.

    Args:
        field: names the model in errors.

    Raises:
        BadInput: the model has no linear head.
    """
    names = [str(model.config.id2label.get(index)) for index in range(model.config.num_labels)]
    places = indices_of(labels, names)
    if places is None:
        return
    if places != sorted(places):
        _move_rows(model, places, field, names, labels)
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {label: index for index, label in enumerate(labels)}


def has_new_head(model: Any) -> bool:
    """Return whether some of the head's weights are not from a file."""
    return _is_outside(model, new_weights(model))


def renew_head(model: Any) -> None:
    """Draw new weights for the head, as Transformers does for a model without one."""
    _, head = class_head(model)
    torch.nn.init.normal_(head.weight, std=getattr(model.config, "initializer_range", 0.02))
    if head.bias is not None:
        torch.nn.init.zeros_(head.bias)


def _move_rows(
    model: Any, places: Sequence[int], field: str, names: Sequence[str], labels: Sequence[str]
) -> None:
    try:
        _, head = class_head(model)
    except BadInput as error:
        raise BadInput(
            f"{field}: its labels are {', '.join(names)}, the data's are {', '.join(labels)}, and "
            f"their order cannot be changed: {error.message}",
            remedy="name the labels in the model's order in data.labels",
        ) from error
    with torch.no_grad():
        for rows in head.parameters():
            rows.copy_(rows[list(places)])


def _is_outside(model: Any, names: Sequence[str]) -> bool:
    """Return whether one of the weights belongs to the head, outside of encoder or decoder."""
    prefix = f"{model.base_model_prefix}."
    return any(not name.startswith(prefix) or in_inner_head(model, name) for name in names)
