"""Export Transformers models with their tokenizer, load them, and log them to MLflow."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import torch

from steadytrain.components.shared.base_model import check_base, note_base
from steadytrain.components.shared.config import AdapterConfig, RunConfig
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.remote_code import has_code, may_run_code, needs_code
from steadytrain.components.tasks.base import Components
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.saving import never_wrapped
from steadytrain.components.tasks.text import TextTraining

ADAPTERS = "adapter_config.json"
"""PEFT's file name. It is next to adapters that were exported without their base model."""


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
        with never_wrapped():
            model.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]
        load_tokenizer(self.data.path(self.data.tokenizer)).save_pretrained(folder)
        if (folder / ADAPTERS).is_file():
            note_base(folder, self.config)

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

    def log_model(
        self, folder: Path, *, name: str, records: pa.Table, metadata: dict[str, str]
    ) -> str:
        from steadytrain.components.tasks.scoring.logged import log_transformers_model

        return log_transformers_model(
            self.load_exported(folder),
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
        except (ValueError, OSError) as error:
            if has_code(folder) and not code:
                raise needs_code(folder) from error
            raise
        return model


def _plain(config: RunConfig) -> RunConfig:
    """Return the configuration without adapters, so that the base loads unquantized in float32."""
    model = config.model.model_copy(update={"adapter": AdapterConfig()})
    return config.model_copy(update={"model": model})
