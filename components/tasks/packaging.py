"""Export Transformers models with their tokenizer, load them, and log them to MLflow.

Saving imports no DeepSpeed, and its errors say why it failed. A logged model can be served with
pyfunc, or loaded in full.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from steadytrain.components.shared.config import AdapterConfig, RunConfig
from steadytrain.components.shared.config.secrets import redact
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.model_source import check_base, name_base, note_base
from steadytrain.components.shared.remote_code import has_code, may_run_code, needs_code
from steadytrain.components.tasks.base import Components, Part
from steadytrain.components.tasks.encoding.labeled_text import PAIR
from steadytrain.components.tasks.encoding.messages import chat_of
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.loaded_weights import dtype_of_files, note_dtype
from steadytrain.components.tasks.scoring.padding import longest
from steadytrain.components.tasks.served import check_files, digests_of
from steadytrain.components.tasks.text import TextTraining

ADAPTERS = "adapter_config.json"
"""PEFT's file name. It is next to adapters that were exported without their base model."""
MODEL_CONFIG = "model_config"
"""Folder next to adapters with the complete model's config.json, which has the class names.

Next to the adapters, Transformers would take it for that of a model with its own weights.
"""


class TransformersPackager(Part):
    """Packages a text task's model.

    training: builds the model that adapters belong to.
    pipeline: the Transformers pipeline that serves the model.
    """

    training: type[TextTraining]
    pipeline: str

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        whole: Any = model
        adapted = hasattr(model, "peft_config")
        if adapted:
            whole = model.get_base_model()  # type: ignore[operator]
        self._set_padding(whole)
        default = torch.float32 if adapted else dtype_of_files(model)
        with never_wrapped():
            save_model(model, folder, self._dtype(default))
        self._tokenizer().save_pretrained(folder)
        if adapted:
            note_base(folder, self.config)
            name_base(folder, self.config)
            config = copy.deepcopy(whole.config)
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            config.save_pretrained(folder / MODEL_CONFIG)
            if whole.can_generate():
                whole.generation_config.save_pretrained(folder)

    def _dtype(self, default: torch.dtype) -> torch.dtype:
        given = self.config.model.export_dtype
        result: torch.dtype = getattr(torch, given) if given else default
        return result

    def _tokenizer(self) -> Any:
        """Return the tokenizer with the padding token that training used."""
        tokenizer = load_tokenizer(self.data.path(self.data.tokenizer))
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(self._padding)
        return tokenizer

    @property
    def _padding(self) -> int:
        return self.training(self.config, self.data).pad_token_id

    def _set_padding(self, model: Any) -> None:
        """Set the padding token of a model that generates, if it has none.

        It stays out of config.json: there, the token's embedding would no longer be trained.
        """
        if model.can_generate() and model.generation_config.pad_token_id is None:
            model.generation_config.pad_token_id = self._padding

    def load_exported(self, folder: Path) -> Components:
        """Load the full model, with adapters merged into it, and the tokenizer.

        Raises:
            BadInput: the adapters were trained on a different base model than the configured one.
        """
        # An absolute path is not a repository name, so MLflow looks for no model card on a hub.
        path = folder.absolute()
        if (path / ADAPTERS).is_file():
            from peft import PeftModel

            check_base(path, self.config)
            base = self.training(_plain(self.config), self.data).build_model()
            adapted = PeftModel.from_pretrained(base, path)
            model = adapted.merge_and_unload()
        else:
            model = self._load_model(path)
        return {"model": model, "tokenizer": load_tokenizer(path)}

    def load_base(self) -> Components:
        """Load model.base in float32, to score it as it was before training.

        Raises:
            BadInput: the task needs weights that it does not have, such as a head for its labels.
        """
        return {"model": self._base(), "tokenizer": self._tokenizer()}

    def _base(self) -> torch.nn.Module:
        training = self.training(_plain(self.config), self.data)
        return training.load_reference(str(self.config.model.base), "model.base")

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:

        components = self.load_exported(folder)
        # Serve it in the precision in which it is exported.
        components["model"].to(self._dtype(dtype_of_files(components["model"])))
        return log_transformers_model(
            components,
            name=name,
            records=records,
            metadata=metadata,
            task=self.pipeline,
        )

    def load_logged(self, model_uri: str) -> Components:

        with fetched_model(model_uri) as (model, tokenizer):
            return {"model": self._load_model(model), "tokenizer": load_tokenizer(tokenizer)}

    def _load_model(self, folder: Path) -> torch.nn.Module:
        """Load the full model of a folder. Its code runs only if it is the pinned base's code."""
        import transformers

        code = may_run_code(folder, self.config)
        try:
            model: torch.nn.Module = getattr(transformers, self.training.auto).from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, trust_remote_code=code
            )
            note_dtype(model, folder)
        except (ValueError, OSError) as error:
            if has_code(folder) and not code:
                raise needs_code(folder) from error
            raise
        return model


def _plain(config: RunConfig) -> RunConfig:
    """Return the configuration without adapters, so that the base loads unquantized in float32."""
    model = config.model.model_copy(update={"adapter": AdapterConfig()})
    training = config.training.model_copy(update={"bf16": False, "fp16": False})
    return config.model_copy(update={"model": model, "training": training})


@contextlib.contextmanager
def never_wrapped() -> Iterator[None]:
    """Speed up `save_pretrained` for a model that no DeepSpeed engine wraps.

    `save_pretrained` makes accelerate look for an engine to unwrap. That imports DeepSpeed, and
    with it MLflow and a web server, wherever they are installed. It accounts for 5 of the 15
    seconds of a short training run (measured on two cores, transformers 5.23, deepspeed 0.19).
    """
    from accelerate.utils import other

    before = other.is_deepspeed_available
    other.is_deepspeed_available = lambda: False
    try:
        yield
    finally:
        other.is_deepspeed_available = before


def save_model(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Save a Transformers model, or adapters, with weights of this precision.

    The model itself stays as it is. Weights that Transformers keeps in 32 bits stay so too.
    """
    if dtype == torch.float32:
        model.save_pretrained(folder, safe_serialization=True)
        return
    kept = [
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    ]
    cast: dict[object, torch.Tensor] = {}

    def stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or any(part in name for part in kept):
            return tensor
        # Tied weights stay one tensor.
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if memory not in cast:
            cast[memory] = tensor.to(dtype)
        return cast[memory]

    weights = {name: stored(name, item) for name, item in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=weights, safe_serialization=True)
    path = folder / "config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        for section in (config, *(item for item in config.values() if isinstance(item, dict))):
            if section.get("dtype") == "float32":
                section["dtype"] = str(dtype).removeprefix("torch.")
        path.write_text(f"{json.dumps(config, indent=2, sort_keys=True)}\n", encoding="utf-8")


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
    from mlflow.models import Model

    model, tokenizer = components["model"], components["tokenizer"]
    length = longest(model, min(tokenizer.model_max_length, _LONGEST))
    several = getattr(model.config, "problem_type", None) == "multi_label_classification"
    scored = model.config.num_labels if several else 0
    example = _example(records)
    if isinstance(example, str):
        example = [example + _to_fill(tokenizer, task)]
    with _quiet(), never_wrapped():
        # As mlflow.transformers.log_model, which cannot describe the files that it writes.
        logged = Model.log(
            artifact_path=None,
            flavor=_WithDigests,
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


class _WithDigests:
    """MLflow's flavor of Transformers, with the digests of the model's files."""

    @staticmethod
    def save_model(path: str, mlflow_model: Any, **given: Any) -> None:
        import mlflow

        mlflow.transformers.save_model(path=path, mlflow_model=mlflow_model, **given)
        folders = {name: Path(path) / name for name in ("model", "components")}
        mlflow_model.metadata = {**mlflow_model.metadata, **digests_of(folders)}
        mlflow_model.save(str(Path(path) / "MLmodel"))


@contextlib.contextmanager
def fetched_model(model_uri: str) -> Iterator[tuple[Path, Path]]:
    """Yield the folders of the model and tokenizer of a logged or registered model.

    This only uses MLflow to download the files. MLflow's own `load_model` would import whatever the
    files name: code next to the model (always with trust_remote_code), the flavor's code paths, a
    loader module.

    Raises:
        BadInput: the model is damaged, or was not logged by `log_transformers_model`.
    """
    import mlflow

    with tempfile.TemporaryDirectory(prefix="steadytrain-model-") as scratch:
        folder = Path(mlflow.artifacts.download_artifacts(model_uri, dst_path=scratch))
        check_files(folder, model_uri)
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
        outputs = [ColSpec(each, str(index)) for index in range(scored)]
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
