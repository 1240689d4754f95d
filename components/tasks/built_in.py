"""The built-in tasks. They are entry points, like the tasks of other packages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.tasks.base import Task, late
from steadytrain.components.tasks.encoding.chat import ChatEncoder
from steadytrain.components.tasks.encoding.labeled_text import (
    LabeledTextEncoder,
    MultiLabelEncoder,
    NumberedTextEncoder,
    PartTextEncoder,
)
from steadytrain.components.tasks.encoding.plain_text import (
    DenoisedTextEncoder,
    MaskedTextEncoder,
    PlainTextEncoder,
)
from steadytrain.components.tasks.encoding.preference import (
    PreferenceEncoder,
    UnpairedPreferenceEncoder,
)
from steadytrain.components.tasks.encoding.text_pairs import TextPairEncoder

_TASKS: Final = "steadytrain.components.tasks"


def _language_metrics(_: RunConfig) -> Sequence[str]:
    return "loss", "perplexity"


def _only_loss(_: RunConfig) -> Sequence[str]:
    return ("loss",)


def _text_metrics(_: RunConfig) -> Sequence[str]:
    return "bits_per_byte", "loss", "perplexity"


def tested_class_metrics(_: RunConfig) -> Sequence[str]:
    """Return the metrics of the test side if each record has one class."""
    ranking, hits = ("auroc", "average_precision"), ("accuracy", "balanced_accuracy", "macro_f1")
    return *hits, *ranking, "ece", "loss"


def _preference_metrics(_: RunConfig) -> Sequence[str]:
    return "loss", "preference_accuracy", "preference_margin"


def _retrieval_metrics(_: RunConfig) -> Sequence[str]:
    return "loss", "recall_at_1", "mean_reciprocal_rank"


def class_metrics(_: RunConfig) -> Sequence[str]:
    """Return the validation metrics if each record has one class."""
    return "loss", "accuracy", "macro_f1"


def _number_metrics(_: RunConfig) -> Sequence[str]:
    return "loss", "mse", "rmse", "mae", "r2", "pearson"


def tested_number_metrics(_: RunConfig) -> Sequence[str]:
    """Return the metrics of the test side if each record has a number."""
    return "loss", "mae", "mse", "pearson", "r2", "rmse", "spearman"


def label_metrics(_: RunConfig) -> Sequence[str]:
    """Return the validation metrics of sets of labels."""
    return "loss", "micro_f1", "macro_f1", "subset_accuracy"


def tested_label_metrics(_: RunConfig) -> Sequence[str]:
    """Return the metrics of sets of labels on the test side."""
    return (
        "auroc",
        "balanced_accuracy",
        "hamming_loss",
        "loss",
        "macro_f1",
        "mean_average_precision",
        "micro_f1",
        "subset_accuracy",
    )


def _part_metrics(config: RunConfig) -> Sequence[str]:
    each = ["loss", "accuracy"]
    if config.training.multi_task.learns_weights:
        each.append("loss_weight")
    return "loss", "accuracy", *(f"{part}_{name}" for part in config.data.parts for name in each)


CAUSAL_LM: Final = Task(
    encoder=PlainTextEncoder,
    training=late(f"{_TASKS}.causal_lm:SupervisedFineTuning", metrics=_language_metrics),
    scorer=late(f"{_TASKS}.scoring.language:LanguageScorer", metrics=_text_metrics),
    packager=late(f"{_TASKS}.causal_lm:LanguageModelPackager"),
    language_model=True,
    objectives=frozenset({"distillation", "contrastive", "r_drop", "focal_loss", "adversarial"}),
    grades=True,
    cuttable=True,
)
# Only the choice of target tokens differs, and preprocessing makes it. An answer needs its prompt.
SUPERVISED_FINETUNING: Final = replace(CAUSAL_LM, encoder=ChatEncoder, cuttable=False)
DENOISING: Final = replace(
    CAUSAL_LM,
    encoder=DenoisedTextEncoder,
    training=late(f"{_TASKS}.causal_lm:Denoising", metrics=_language_metrics),
    scorer=late(f"{_TASKS}.scoring.language:DenoisingScorer", metrics=_only_loss),
    objectives=CAUSAL_LM.objectives | {"denoising"},
    cuttable=False,
    targets=lambda training: training.denoising.targets,
)
PREFERENCE: Final = Task(
    encoder=PreferenceEncoder,
    training=late(f"{_TASKS}.preference:PreferenceTraining", metrics=_preference_metrics),
    scorer=late(f"{_TASKS}.scoring.preference:PreferenceScorer", metrics=_preference_metrics),
    packager=late(f"{_TASKS}.causal_lm:LanguageModelPackager"),
    language_model=True,
    objectives=frozenset({"dpo"}),
    sequences=2,
    reference=True,
)
UNPAIRED_PREFERENCE: Final = replace(
    PREFERENCE,
    encoder=UnpairedPreferenceEncoder,
    training=late(f"{_TASKS}.preference:UnpairedPreferenceTraining", metrics=_preference_metrics),
    scorer=late(
        f"{_TASKS}.scoring.preference:UnpairedPreferenceScorer", metrics=_preference_metrics
    ),
    objectives=frozenset({"kto"}),
    sequences=1,
    measures=True,
)
MASKED_LM: Final = Task(
    encoder=MaskedTextEncoder,
    training=late(f"{_TASKS}.masked_lm:MaskedLanguageModel", metrics=_language_metrics),
    scorer=late(f"{_TASKS}.scoring.language:MaskedScorer", metrics=_only_loss),
    packager=late(f"{_TASKS}.masked_lm:MaskedLanguageModelPackager"),
    objectives=frozenset({"masking", "adversarial"}),
    grades=True,
    targets=lambda training: training.masking.probability,
)
TEXT_EMBEDDING: Final = Task(
    encoder=TextPairEncoder,
    training=late(f"{_TASKS}.text_embedding:TextEmbedding", metrics=_retrieval_metrics),
    scorer=late(f"{_TASKS}.scoring.retrieval:RetrievalScorer", metrics=_retrieval_metrics),
    packager=late(f"{_TASKS}.text_embedding:TextEmbeddingPackager"),
    objectives=frozenset({"batch_contrastive"}),
    sequences=2,
    contrasts=True,
)
SEQUENCE_CLASSIFICATION: Final = Task(
    encoder=LabeledTextEncoder,
    training=late(
        f"{_TASKS}.sequence_classification:SequenceClassification", metrics=class_metrics
    ),
    scorer=late(
        f"{_TASKS}.scoring.classification:ClassificationScorer", metrics=tested_class_metrics
    ),
    packager=late(f"{_TASKS}.sequence_classification:ClassifierPackager"),
    objectives=frozenset(
        {
            "distillation",
            "batch_contrastive",
            "r_drop",
            "focal_loss",
            "class_weights",
            "adversarial",
            "mixup",
            "augmentation",
        }
    ),
    robustness=True,
    grades=True,
)
SEQUENCE_REGRESSION: Final = Task(
    encoder=NumberedTextEncoder,
    training=late(f"{_TASKS}.sequence_regression:SequenceRegression", metrics=_number_metrics),
    scorer=late(f"{_TASKS}.scoring.whole_texts:RegressionScorer", metrics=tested_number_metrics),
    packager=late(f"{_TASKS}.sequence_regression:RegressionPackager"),
    objectives=frozenset({"adversarial", "augmentation"}),
    robustness=True,
    grades=True,
    regresses=True,
)
MULTI_LABEL_CLASSIFICATION: Final = Task(
    encoder=MultiLabelEncoder,
    training=late(f"{_TASKS}.multi_label:MultiLabelClassification", metrics=label_metrics),
    scorer=late(f"{_TASKS}.scoring.multi_label:MultiLabelScorer", metrics=tested_label_metrics),
    packager=late(f"{_TASKS}.multi_label:MultiLabelPackager"),
    objectives=frozenset({"adversarial", "augmentation"}),
    robustness=True,
    grades=True,
)
MULTI_TASK: Final = Task(
    encoder=PartTextEncoder,
    training=late(f"{_TASKS}.multi_task:MultiTaskClassification", metrics=_part_metrics),
    scorer=late(f"{_TASKS}.scoring.classification:MultiTaskScorer", metrics=tested_class_metrics),
    packager=late(f"{_TASKS}.multi_task:MultiTaskPackager"),
    objectives=frozenset(
        {"multi_task", "r_drop", "focal_loss", "class_weights", "adversarial", "augmentation"}
    ),
    robustness=True,
    grades=True,
)
