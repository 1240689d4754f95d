"""Export Transformers models with their tokenizer, load them, and log them to MLflow."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from steadytrain.components.shared.config import AdapterConfig, RunConfig
from steadytrain.components.shared.model_source import check_base, name_base, note_base
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.remote_code import has_code, may_run_code, needs_code
from steadytrain.components.tasks.base import Components
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.loaded_weights import dtype_of_files, note_dtype
from steadytrain.components.tasks.saving import never_wrapped, save_model
from steadytrain.components.tasks.text import TextTraining

ADAPTERS = "adapter_config.json"
"""PEFT's file name. It is next to adapters that were exported without their base model."""
MODEL_CONFIG = "model_config"
"""Folder beside adapters with the complete model's config.json, which has the class names.

Next to the adapters, Transformers would take it for that of a model with its own weights.
"""


class TransformersPackager:
    """Packages a text task's model.

    training: builds the model that adapters belong to.
    pipeline: the Transformers pipeline that serves the model.
    """

    training: type[TextTraining]
    pipeline: str

    def __init__(self, config: RunConfig, data: DataRecord) -> None:
        self.config, self.data = config, data

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
        found: torch.dtype = getattr(torch, given) if given else default
        return found

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
        place = folder.absolute()
        if (place / ADAPTERS).is_file():
            from peft import PeftModel

            check_base(place, self.config)
            base = self.training(_plain(self.config), self.data).build_model()
            adapted = PeftModel.from_pretrained(base, place)
            model = adapted.merge_and_unload()
        else:
            model = self._load_model(place)
        return {"model": model, "tokenizer": load_tokenizer(place)}

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
        from steadytrain.components.tasks.scoring.logged import log_transformers_model

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
        from steadytrain.components.tasks.scoring.logged import fetched_model

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
