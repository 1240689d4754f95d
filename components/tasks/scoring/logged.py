"""Transformers models in MLflow: logged so that pyfunc can serve them, and loaded in full."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.encoding.labeled_text import PAIR
from steadytrain.components.tasks.encoding.messages import chat_of
from steadytrain.components.tasks.saving import never_wrapped
from steadytrain.components.tasks.scoring.table import longest

_EXAMPLE_CHARACTERS = 200
_FILL = "fill-mask"
_EMBED = "feature-extraction"
_LONGEST = 1_000_000  # a tokenizer without a limit returns 10^30, which it does not accept itself
_NEEDED = ("torch", "transformers", "safetensors", "accelerate")


def log_transformers_model(
    components: Mapping[str, Any],
    *,
    name: str,
    records: pa.Table,
    metadata: dict[str, str],
    task: str,
) -> str:
    """Log an exported model to the active MLflow run, with the transformers and pyfunc flavors.

    Args:
        components: "model" and "tokenizer", as loaded from an exported folder.
        records: source of the input example.
        task: a Transformers pipeline, text-generation, text-classification, fill-mask or
            feature-extraction.

    Returns:
        The model's URI.
    """
    import mlflow

    model, tokenizer = components["model"], components["tokenizer"]
    length = longest(model, min(tokenizer.model_max_length, _LONGEST))
    several = getattr(model.config, "problem_type", None) == "multi_label_classification"
    scored = model.config.num_labels if several else 0
    example = _example(records)
    if isinstance(example, str):
        example = [example + _to_fill(tokenizer, task)]
    with _quiet(), never_wrapped():
        logged = mlflow.transformers.log_model(
            transformers_model=dict(components),
            name=name,
            task=task,
            signature=_signature(task, example, scored),
            input_example=example,
            metadata=metadata,
            # With any number of labels, the score of each is returned, not only the highest.
            model_config=_settings(task, length) | ({"top_k": None} if scored else {}),
            # List these explicitly: MLflow would load the model in another process to find them.
            pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in _NEEDED],
        )
    return str(logged.model_uri)


@contextlib.contextmanager
def fetched_model(model_uri: str) -> Iterator[tuple[Path, Path]]:
    """Yield the folders of the model and tokenizer of a logged or registered model.

    This only uses MLflow to download the files. MLflow's own `load_model` would import whatever the
    files name: code next to the model (always with trust_remote_code), the flavor's code paths, a
    loader module.

    Raises:
        BadInput: the model was not logged by `log_transformers_model`.
    """
    import mlflow

    with tempfile.TemporaryDirectory(prefix="steadytrain-model-") as scratch:
        folder = Path(mlflow.artifacts.download_artifacts(model_uri, dst_path=scratch))
        model, tokenizer = folder / "model", folder / "components" / "tokenizer"
        if not (model / "config.json").is_file() or not tokenizer.is_dir():
            raise BadInput(
                f"{model_uri} has no model/config.json and components/tokenizer: it was not "
                "logged by steadytrain",
                remedy="register a model that steadytrain has trained",
            )
        yield model, tokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence MLflow's warning that no hub has a card and license for a newly trained model."""
    logger = logging.getLogger("mlflow.transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _signature(task: str, example: Any, scored: int) -> Any:
    """Return the signature.

    Args:
        scored: number of labels whose scores are returned for each text; 0 for the best one alone.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import DataType
    from mlflow.types.schema import ColSpec, Object, Property, Schema

    if task == _EMBED:
        # An array for each text, with as many rows as it has tokens.
        return ModelSignature(inputs=Schema([ColSpec("string")]))
    outputs = (
        [ColSpec("string")]
        if task in ("text-generation", _FILL)
        else [ColSpec("string", "label"), ColSpec("double", "score")]
    )
    if scored:
        each = Object([Property("label", DataType.string), Property("score", DataType.double)])
        outputs = [ColSpec(each, str(place)) for place in range(scored)]
    names = list(example) if isinstance(example, dict) else [None]
    inputs = Schema([ColSpec("string", name) for name in names])
    return ModelSignature(inputs=inputs, outputs=Schema(outputs))


def _to_fill(tokenizer: Any, task: str) -> str:
    """Return the end of an example that a pipeline of this kind needs."""
    return f" {tokenizer.mask_token}" if task == _FILL else ""


def _settings(task: str, length: int) -> dict[str, Any]:
    """Return the arguments for the pipeline when the model is served."""
    if task == "text-generation":
        return {"max_new_tokens": 64}
    if task in (_FILL, _EMBED):
        return {"tokenizer_kwargs": {"truncation": True, "max_length": length}}
    return {"truncation": True, "max_length": length}


def _example(records: pa.Table) -> Any:
    """Return the beginning of a record, or of its first message if it is a chat.

    For a pair of texts, it is a mapping.
    """
    first = records.slice(0, 1).to_pylist()[0]
    if first.get("messages") is not None:
        messages, _ = chat_of(first["messages"])
        return redact(messages[0]["content"] or "")[:_EXAMPLE_CHARACTERS]
    names = [name for name in ("text", PAIR) if name in first]
    texts = {name: redact(first[name])[:_EXAMPLE_CHARACTERS] for name in names}
    return texts if PAIR in texts else texts["text"]
