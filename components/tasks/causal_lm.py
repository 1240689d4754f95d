"""Causal language models, trained on packed documents.

Supervised fine-tuning trains in the same way. Only the choice of target tokens differs, and
preprocessing has already made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch.nn import functional

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import Batch, LossSum, Row
from steadytrain.components.tasks.criterion import Criterion
from steadytrain.components.tasks.document_attention import Documents
from steadytrain.components.tasks.documents import (
    attend_by_document,
    collate_documents,
    collate_packed,
    collate_rows,
    isolates_documents,
    pass_documents,
)
from steadytrain.components.tasks.encoding.plain_text import corruption_of
from steadytrain.components.tasks.fused_head import (
    Contrast,
    LossRequest,
    StatesRequest,
    likelihoods_of,
    requested,
)
from steadytrain.components.tasks.model_fields import ROUTER_COEFFICIENTS, ROUTER_ON
from steadytrain.components.tasks.models import build, load_frozen
from steadytrain.components.tasks.packaging import TransformersPackager
from steadytrain.components.tasks.text import R_DROP, LanguageModelTraining, check_drops
from steadytrain.components.techniques.base import IGNORED
from steadytrain.components.techniques.contrastive_tokens.loss import document_spans
from steadytrain.components.techniques.distillation.loss import (
    COLUMNS,
    Teaching,
    attach_comparison,
    collate_answers,
    comparing,
    comparing_part,
    taught_loss,
)
from steadytrain.components.techniques.distillation.teacher import (
    FIELD,
    AnsweringTeacher,
    LogitsOf,
    Teacher,
    check_vocabulary,
    stored_teaching,
)
from steadytrain.components.techniques.hidden_spans.spans import SpanCorruption
from steadytrain.components.techniques.modules import eval_mode
from steadytrain.components.techniques.r_drop.passes import in_pairs, twice


def stop_at(model: Any, tokens: Sequence[int]) -> list[int]:
    """Add tokens to those that end the model's answers, in its generation configuration.

    Returns:
        Those that were not among them.
    """
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return []
    known = settings.eos_token_id
    known = [] if known is None else list(known) if isinstance(known, list) else [known]
    added = [token for token in tokens if token not in known]
    if added:
        settings.eos_token_id = [*known, *added]
    return added


_NOT_FOR_MODELS: Final = ("targets", "lengths", "spans", "counts", *COLUMNS)
"""Entries of a micro-batch that the model does not get."""


class SupervisedFineTuning(LanguageModelTraining):
    """Predicts each target token from the tokens before it in its document.

    The targets of supervised fine-tuning are answers; those of pre-training, all tokens.
    """

    task = "causal_lm"
    auto = "AutoModelForCausalLM"
    packed = True
    by_document = False
    router = 0.0
    stops: Sequence[int] = ()
    teacher: Teacher | None = None

    @cached_property
    def criterion(self) -> Criterion:
        return Criterion.of(self.config.training)

    def build_model(self) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        model = build(AutoModelForCausalLM, self.config, self.data, self.tokenizer)
        self.packed = isolates_documents(model, len(self.tokenizer))
        self.stops = stop_at(model, self.data.turn_ends)
        return model

    def extend(self, model: torch.nn.Module) -> None:
        if self.config.training.distillation.hidden.on:
            attach_comparison(model, self.config)

    def ready(self, model: torch.nn.Module) -> Sequence[str]:
        from steadytrain.components.tasks.fused_head import fuse_head

        remarks = [*self._stop_remarks()]
        why = fuse_head(model)
        if why and self.config.training.contrastive.on:
            raise BadInput(
                f"training.contrastive needs the input of the model's head: {why}",
                remedy="leave it out, or use another model",
            )
        if why:
            remarks.append(f"the loss computes the logits of a whole micro-batch at once: {why}")
        if why := attend_by_document(model, len(self.tokenizer)):
            remarks.append(f"attention also computes padding and pairs across documents: {why}")
        self.by_document = not why
        if self.criterion.r_drop:
            check_drops(model, R_DROP, self.criterion.r_drop)
        distillation = self.config.training.distillation
        if distillation.on and not distillation.stored:
            remarks += self._get_teacher(model)
        self.router = router_coefficient(model)
        if self.router and not self.by_document:
            # Documents of their own come with a mask, which keeps padding out of the balance.
            self.packed = False
        return remarks

    def _stop_remarks(self) -> Iterator[str]:
        """Yield how the exported model ends an answer, if that is not how the base model does."""
        if self.stops:
            names = ", ".join(self.tokenizer.convert_ids_to_tokens(list(self.stops)))
            yield (
                f"the exported model also stops generating at {names}, which ends the assistant's "
                "turns in the data: eos_token_id in its generation_config.json has it"
            )

    def open_teacher(self, student: torch.nn.Module) -> AnsweringTeacher:
        model, _ = self._load_teacher(student)
        packed = isolates_documents(model, len(self.tokenizer))
        by_document = not attend_by_document(model, len(self.tokenizer))
        return AnsweringTeacher(
            Teacher(model, self.config.training.distillation),
            token_answers,
            partial(
                _collated, packed=packed, by_document=by_document, pad_token_id=self.pad_token_id
            ),
            model.get_input_embeddings().num_embeddings,
        )

    def _load_teacher(self, student: torch.nn.Module) -> tuple[Any, str]:
        """Load the teacher. Return it, and why its head is not fused."""
        from transformers import AutoModelForCausalLM

        from steadytrain.components.tasks.fused_head import fuse_head

        address = self.config.training.distillation.teacher
        model = load_frozen(
            AutoModelForCausalLM, address, FIELD, self.config, self.data, self.tokenizer
        )
        check_vocabulary(model, student, address)
        return model, fuse_head(model)

    def _get_teacher(self, student: torch.nn.Module) -> Sequence[str]:
        """Load the teacher. Both models then attend in the way that both support."""
        remarks = []
        model, why = self._load_teacher(student)
        if why:
            remarks.append(f"the teacher's logits of a whole micro-batch exist at once: {why}")
        self.packed = self.packed and isolates_documents(model, len(self.tokenizer))
        if self.by_document and (why := attend_by_document(model, len(self.tokenizer))):
            remarks.append(f"attention also computes pairs across documents: the teacher: {why}")
            self.by_document = False
        settings = self.config.training.distillation
        self.teacher = Teacher(model, settings, comparing_part(student))
        return remarks

    def load_reference(self, address: str, field: str) -> torch.nn.Module:
        from steadytrain.components.tasks.fused_head import fuse_head

        model = super().load_reference(address, field)
        self.packed = isolates_documents(model, len(self.tokenizer))
        fuse_head(model)
        self.by_document = not attend_by_document(model, len(self.tokenizer))
        return model

    def row_losses(
        self, model: torch.nn.Module, batch: Batch, counts: Sequence[int]
    ) -> torch.Tensor:
        return -likelihoods_of(partial(token_logits, model, batch), batch["targets"], counts)

    def collate(self, rows: Sequence[Row]) -> Batch:
        batch = _collated(
            rows,
            packed=self.packed,
            by_document=self.by_document,
            pad_token_id=self.pad_token_id,
        )
        batch |= collate_answers(rows)
        if self.config.training.contrastive.on:
            batch["spans"] = document_spans(batch)
        return batch

    def weight(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORED).sum())

    def compute_loss(self, model: torch.nn.Module, batch: Batch) -> LossSum:
        settings = self.config.training.distillation
        teaching = stored_teaching(batch, settings)
        if self.teacher is not None:
            teaching = self.teacher.teach(token_answers, batch)
        smoothing = self.config.training.label_smoothing_factor
        added = self.config.training.contrastive
        contrast = Contrast(batch["spans"], added) if added.on else None
        criterion = None if self.criterion.plain else self.criterion
        # The loss is divided by the targets of the global batch. So this is the mean of the
        # micro-batches' router losses, each weighted by its targets.
        router = self.router * (batch["targets"] != IGNORED).sum() if self.router else None
        if self.criterion.r_drop:
            batch = twice(batch)
        how = (smoothing, teaching, contrast, criterion, router)
        return LossSum(next_token_loss(model, batch, *how))

    def validate(self, model: torch.nn.Module, batch: Batch) -> dict[str, float]:
        return {"loss": next_token_loss(model, batch).item(), "weight": self.weight(batch)}


def _collated(rows: Sequence[Row], *, packed: bool, by_document: bool, pad_token_id: int) -> Batch:
    """Return a micro-batch in the arrangement that the attention supports."""
    if by_document:
        return collate_packed(rows)
    return (collate_rows if packed else collate_documents)(rows, pad_token_id)


class LanguageModelPackager(TransformersPackager):
    """Packages a causal language model."""

    training = SupervisedFineTuning
    pipeline = "text-generation"

    def _tokenizer(self) -> Any:
        tokenizer = super()._tokenizer()
        # An answer follows the last token of a prompt, so batches of prompts are padded before it.
        tokenizer.padding_side = "left"
        return tokenizer


def token_output(model: torch.nn.Module, batch: Batch, *, states: bool = False) -> Any:
    """Return what Transformers' language model returns for a micro-batch.

    Every forward pass of this task is here. `logits` may be what the head is requested to return
    instead.

    Args:
        states: whether that includes the states of all layers.
    """
    inputs = {key: value for key, value in batch.items() if key not in _NOT_FOR_MODELS}
    documents = Documents(batch["lengths"]) if "lengths" in batch else None
    more = {"output_hidden_states": True} if states else {}
    with pass_documents(documents) as extra:
        return model(**inputs, **extra, **more, use_cache=False)


def token_answers(
    model: torch.nn.Module, batch: Batch, *, states: bool = False
) -> tuple[Any, LogitsOf]:
    """Return what `token_output` returns, and what gives the logits of some tokens.

    If the model's head is fused, no logits of a complete micro-batch are computed.
    """
    with requested(StatesRequest()) as request:
        output = token_output(model, batch, states=states)
    if request.hidden is not None:
        return output, request.logits
    logits = output.logits.flatten(0, -2)
    return output, lambda rows: logits[rows]


def token_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the logits of a micro-batch, or what the head is requested to return instead."""
    logits: torch.Tensor = token_output(model, batch).logits
    return logits


def next_token_loss(
    model: torch.nn.Module,
    batch: Batch,
    smoothing: float = 0.0,
    teaching: Teaching | None = None,
    contrast: Contrast | None = None,
    criterion: Criterion | None = None,
    router: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the summed loss of a micro-batch: the cross-entropy in nats, and other objectives.

    Args:
        contrast: only for a model with a fused head.
        criterion: as in `fused_loss.summed_loss`.
        router: scalar, by which the router loss of the model is multiplied; None leaves it out.
    """
    comparison = teaching.comparison if teaching else None
    with (
        requested(
            LossRequest(batch["targets"], smoothing, teaching, contrast, criterion)
        ) as request,
        comparing(comparison, (batch["targets"] != IGNORED).float()),
    ):
        output = token_output(model, batch, states=comparison is not None)
    # The model's wrappers attached their backward work to this output, not to `request.loss`.
    loss: torch.Tensor = output.logits
    if request.loss is None:
        loss = _loss_of_logits(loss, batch, smoothing, teaching, criterion)
    if router is not None:
        loss = loss + router * router_loss(output)
    return loss if comparison is None else loss + comparison.loss(output)


def _loss_of_logits(
    logits: torch.Tensor,
    batch: Batch,
    smoothing: float,
    teaching: Teaching | None,
    criterion: Criterion | None,
) -> torch.Tensor:
    """Return the summed loss of complete logits, (rows, length, vocabulary)."""
    if teaching is not None:
        kept = (batch["targets"].flatten() != IGNORED).nonzero().squeeze(1)
        some = replace(teaching, logits=lambda rows: teaching.logits(kept[rows]))
        result = logits.flatten(0, 1).float()[kept]
        return taught_loss(result, batch["targets"].flatten()[kept], some, smoothing)
    if criterion is not None:
        kept = (batch["targets"].flatten() != IGNORED).nonzero().squeeze(1)
        kept = in_pairs(kept) if criterion.r_drop else kept
        return criterion(logits.flatten(0, 1).float()[kept], batch["targets"].flatten()[kept])
    return functional.cross_entropy(
        logits.flatten(0, 1).float(),
        batch["targets"].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )


class Denoising(SupervisedFineTuning):
    """Predict the hidden spans of each row. What is drawn from a row is one document."""

    task = "denoising"
    padded = "input_ids"

    @cached_property
    def corruption(self) -> SpanCorruption:
        return corruption_of(self.tokenizer, self.config.training.denoising)

    def draw(self, row: Row, position: int, *, training: bool) -> Row:
        # Validation hides the same spans for every seed of training.
        seed = (1, self.config.training.seed, position) if training else (0, position)
        corrupted = self.corruption.apply(row["input_ids"], self.data.sequence_length, *seed)
        return {
            "input_ids": corrupted.input_ids,
            "targets": corrupted.targets,
            "lengths": [len(corrupted.input_ids)],
        }


def router_coefficient(model: Any) -> float:
    """Return what the router loss is multiplied by; 0 if the model's configuration turns it off.

    Raises:
        BadInput: the configuration turns it on, and the model has none.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(base.config.get_text_config(), ROUTER_ON, False):
        return 0.0
    coefficients = (getattr(base, name, None) for name in ROUTER_COEFFICIENTS)
    coefficient = float(next((value for value in coefficients if value is not None), 0.0))
    if coefficient:
        ids = torch.zeros((1, 4), dtype=torch.int64, device=next(model.parameters()).device)
        with eval_mode(model):
            router_loss(model(input_ids=ids, use_cache=False))
    return coefficient


def router_loss(output: Any) -> torch.Tensor:
    """Return the router loss that a model has returned with its logits, a scalar.

    It measures how evenly the tokens are spread over the experts (Fedus et al. 2021, "Switch
    Transformers", equations 4 to 6). Transformers' models compute it in their forward pass, and
    add it to their own loss.

    Raises:
        BadInput: it has returned none.
    """
    result = getattr(output, "aux_loss", None)
    if not isinstance(result, torch.Tensor):
        raise BadInput(
            f"the model's configuration has {ROUTER_ON}: true, and the model returns no router "
            "loss",
            remedy="set it to false in the model's configuration",
        )
    return result
