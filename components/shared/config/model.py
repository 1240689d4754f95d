"""What is trained: a model, or adapters beside one whose own weights stay."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from steadytrain.components.shared.config.base import Section, at_odds


class AdapterConfig(Section):
    """Low-rank matrices beside the weights of a model, which alone are trained (Hu et al. 2021)."""

    kind: Literal["none", "lora", "qlora"] = Field(
        "none",
        description="lora: the model's own weights stay; qlora: in 4 bits too (NF4 with double "
        "quantization), which needs CUDA",
    )
    rank: int = Field(16, ge=4, le=64, description="of the matrices")
    alpha: int | None = Field(
        None, ge=1, description="what they add is scaled by alpha over rank; none: twice the rank"
    )
    dropout: float = Field(0.05, ge=0, lt=1, description="of what goes into them")
    targets: list[str] | None = Field(
        None,
        min_length=1,
        description="names of the linear layers that get them; none: all but the head",
    )
    merge: bool = Field(
        False,
        description="whether the model that leaves training has them added to its weights; "
        "otherwise the adapters leave alone, and want the base model wherever they are used",
    )

    @property
    def scale(self) -> int:
        """LoRA's alpha."""
        return self.alpha or 2 * self.rank

    @property
    def freezes(self) -> bool:
        """Whether the model's own weights stay as they are."""
        return self.kind != "none"


class ModelConfig(Section):
    """The model to start from: a trained one, or an architecture to train from scratch."""

    framework: str = Field("pytorch", description="which trainer trains it")
    base: str | None = Field(
        None,
        min_length=1,
        description="a folder, s3:// address, hub:NAME, models:/NAME@ALIAS of MLflow, or "
        "package:NAME/PATH; none: from scratch, by `config`",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="branch, tag or commit of a hub model; with trust_remote_code what pins its "
        "code: the commit of a hub model, or the sha256:... of the code that the error names",
    )
    trust_remote_code: bool = Field(
        False,
        description="whether Python code beside the base model may run; only what `revision` pins",
    )
    config: dict[str, Any] = Field(
        default={}, description="Transformers' configuration, model_type included, from scratch"
    )
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="an address as for `base`; none: the base model's, or a trained one",
    )
    vocab_size: int = Field(8192, ge=300, description="of a tokenizer trained from scratch")
    adapter: AdapterConfig = AdapterConfig()

    @field_validator("config")
    @classmethod
    def _plain(cls, config: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(config, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"is not plain JSON: {error}") from None
        return config

    @model_validator(mode="after")
    def _has_a_start(self) -> ModelConfig:
        if self.base is None and "model_type" not in self.config:
            raise at_odds(
                "model.base",
                self.base,
                "there is no model to start from",
                "name one, or give model.config a model_type to train from scratch",
            )
        if self.base is not None and self.config:
            raise at_odds(
                "model.config",
                self.config,
                "it excludes model.base, which brings a configuration of its own",
                "leave out one of the two",
            )
        return self

    @model_validator(mode="after")
    def _code_is_pinned(self) -> ModelConfig:
        if not self.trust_remote_code:
            return self
        if self.base is None:
            raise at_odds(
                "model.trust_remote_code",
                value=True,
                message="there is no model.base whose code could run",
                remedy="leave it out",
            )
        if self.base.startswith("hub:") and not re.fullmatch("[0-9a-f]{40}", self.revision or ""):
            raise at_odds(
                "model.revision",
                self.revision,
                "with model.trust_remote_code it must pin the code, and a branch or tag can move",
                "give the commit (40 hexadecimal digits) whose code you have read",
            )
        return self
