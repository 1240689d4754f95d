"""The built-in tasks. They are entry points, like the tasks of other packages."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from steadytrain.components.tasks.base import Task, late
from steadytrain.components.tasks.encoding.chat import ChatEncoder
from steadytrain.components.tasks.encoding.labeled_text import LabeledTextEncoder
from steadytrain.components.tasks.encoding.plain_text import PlainTextEncoder

_TASKS: Final = "steadytrain.components.tasks"

CAUSAL_LM: Final = Task(
    encoder=PlainTextEncoder,
    training=late(f"{_TASKS}.causal_lm:CausalLanguageModel"),
    scorer=late(f"{_TASKS}.scoring.language:LanguageScorer"),
    packager=late(f"{_TASKS}.causal_lm:LanguageModelPackager"),
    language_model=True,
    objectives=frozenset({"distillation", "contrastive", "r_drop", "focal_loss"}),
)
# Only the choice of target tokens differs, and preprocessing makes it.
SUPERVISED_FINETUNING: Final = replace(CAUSAL_LM, encoder=ChatEncoder)
SEQUENCE_CLASSIFICATION: Final = Task(
    encoder=LabeledTextEncoder,
    training=late(f"{_TASKS}.sequence_classification:SequenceClassification"),
    scorer=late(f"{_TASKS}.scoring.classification:ClassificationScorer"),
    packager=late(f"{_TASKS}.sequence_classification:ClassifierPackager"),
    objectives=frozenset(
        {
            "distillation",
            "batch_contrastive",
            "r_drop",
            "focal_loss",
            "class_weights",
            "adversarial",
        }
    ),
    robustness=True,
)
