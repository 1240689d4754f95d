"""What is trained: a model, or adapters on a model whose own weights are frozen."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from steadytrain.components.shared import plugins
from steadytrain.components.shared.effects import (
    Address,
    Effect,
    IfSet,
    PlainJson,
    Section,
    at_odds,
    check_plugins,
)
from steadytrain.components.techniques.dropout import (
    DropoutConfig,
    dropout_fields,
    dropout_problem,
)

Precision = Literal["float32", "bfloat16", "float16"]
ENSEMBLE: Final = "ensemble"
"""The framework of a model whose members are models of other frameworks."""


class FusionConfig(Section):
    """The encoder of images, and the head that reads the outputs of all encoders.

    The encoder of texts is `model.base`, or `model.config` from scratch.
    """

    image: PlainJson = Field(
        default={},
        description="Transformers configuration of the encoder of images, including model_type. "
        "It is trained from scratch; its image size and channels are those of data.images.",
    )
    image_base: Annotated[Address | None, IfSet()] = Field(
        None,
        description="Address of a pretrained encoder of images, instead of model.fusion.image: a "
        "folder, s3://, hub:NAME, models:NAME@ALIAS or package:NAME, of Transformers or timm. "
        "Its files also say how pixels are scaled (data.images.normalization).",
    )
    width: int = Field(
        128,
        ge=4,
        le=8192,
        description="Values that the head reads of each encoder, and its hidden units.",
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout in the head.")

    @model_validator(mode="after")
    def _image_has_a_type(self) -> FusionConfig:
        if self.image and self.image_base:
            raise at_odds(
                "model.fusion.image_base",
                self.image_base,
                "model.fusion.image is an encoder from scratch",
                "leave out one of the two",
            )
        if self.image and "model_type" not in self.image:
            raise at_odds(
                "model.fusion.image",
                self.image,
                "it has no model_type",
                "give it one, such as convnext or vit",
            )
        return self


class AdapterConfig(Section):
    """Low-rank matrices trained next to a frozen model's weights (Hu et al. 2021)."""

    kind: Literal["none", "lora", "qlora"] = Field(
        "none",
        description="Kind of adapter. none: train the model's own weights; lora: freeze them and "
        "train adapters; qlora: also keep the frozen weights in the bits of quantization.",
    )
    quantization: Annotated[Literal["nf4", "fp4", "int8"], IfSet()] = Field(
        "nf4",
        description="The bits of qlora's frozen layers. nf4: 4 bits, values that are spaced for "
        "normally distributed weights; fp4: 4 bits, floating-point numbers, which are further off; "
        "int8: 8 bits, integers with a scale for each row, which multiply inputs that are rounded "
        "to 8 bits too, except for columns with values from 6 on (LLM.int8()).",
    )
    rank: int = Field(16, ge=4, le=64, description="Rank of the adapter matrices.")
    alpha: int | None = Field(
        None,
        ge=1,
        description="Adapter outputs are scaled by alpha divided by rank. None means twice "
        "the rank.",
    )
    dropout: float = Field(0.05, ge=0, lt=1, description="Dropout on the input of the adapters.")
    targets: list[str] | None = Field(
        None,
        min_length=1,
        description="Names of the linear layers that get adapters. None means all except the head.",
    )
    frozen_embeddings: Annotated[Literal["device", "host"], Effect.HANDLING] = Field(
        "device",
        description="Where to keep the model's frozen embeddings. host: look up rows in host "
        "memory, with the same values.",
    )
    frozen_head: Literal["as_loaded", "8bit", "4bit"] = Field(
        "as_loaded",
        description="Precision of a language model's frozen head, which is unpacked one block at "
        "a time. During training its weights are off by 0.6 % (8bit) or 9 % (4bit, NF4).",
    )
    merge: Annotated[bool, Effect.EXPORTED] = Field(
        False,
        description="Add the adapters to the exported model's weights. Otherwise only the "
        "adapters are exported, and using them requires the base model.",
    )

    @property
    def scale(self) -> int:
        """LoRA's alpha."""
        return self.alpha or 2 * self.rank

    @property
    def freezes(self) -> bool:
        """Whether the model's own weights are frozen."""
        return self.kind != "none"

    @property
    def lightened(self) -> str:
        """The setting that saves device memory on frozen parts, as field and value; "" if none."""
        if self.frozen_head != "as_loaded":
            return f"model.adapter.frozen_head {self.frozen_head}"
        host = self.frozen_embeddings == "host"
        return "model.adapter.frozen_embeddings host" if host else ""

    @model_validator(mode="after")
    def _something_is_quantized(self) -> AdapterConfig:
        if self.quantization != "nf4" and self.kind != "qlora":
            raise at_odds(
                "model.adapter.quantization",
                self.quantization,
                f"model.adapter.kind is {self.kind}, which does not quantize the layers",
                "set model.adapter.kind to qlora, or leave it out",
            )
        return self

    @model_validator(mode="after")
    def _something_is_frozen(self) -> AdapterConfig:
        if self.lightened and not self.freezes:
            field, _, value = self.lightened.partition(" ")
            raise at_odds(
                field,
                value,
                "without adapters nothing is frozen",
                "set model.adapter.kind to lora or qlora, or leave it out",
            )
        return self


class ModelConfig(Section):
    """The model to start from: a trained model, or an architecture to train from scratch."""

    framework: Annotated[str, Effect.TOKENS] = Field(
        "pytorch", description="Trainer to use: pytorch, or a name that an installed package adds."
    )
    base: Address | None = Field(
        None,
        description="Model to start from: a folder, s3:// address, hub:NAME, models:/NAME@ALIAS "
        "in MLflow, or package:NAME/PATH. None means training from scratch with `config`.",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="Branch, tag or commit of a hub model. With trust_remote_code, it pins the "
        "code: the commit of a hub model, or the sha256:... of the code that the error shows. "
        "None means the default branch of a hub model.",
    )
    trust_remote_code: Annotated[bool, Effect.EXPORTED] = Field(
        False,
        description="Allow Python code that comes with the base model to run. Only code pinned by "
        "`revision` runs.",
    )
    config: PlainJson = Field(
        default={},
        description="Transformers configuration for training from scratch, including model_type. "
        "A mixture of experts adds its router loss with output_router_logits: true, times its "
        "router_aux_loss_coef.",
    )
    tokenizer: Annotated[Address | None, Effect.TOKENS] = Field(
        None,
        description="Tokenizer to use: an address as for `base`. None means the base model's "
        "tokenizer, or a newly trained one.",
    )
    vocab_size: Annotated[int, Effect.TOKENS] = Field(
        8192, ge=300, description="Vocabulary size, in tokens, of a tokenizer trained from scratch."
    )
    added_tokens: Annotated[list[str], Field(max_length=1000), Effect.ENCODING, IfSet()] = Field(
        [],
        description="Tokens to add to the tokenizer, such as the marks of a chat template, for "
        "which they are special tokens. Each begins as the mean of the base model's tokens, and "
        "is learned.",
    )
    export_dtype: Annotated[Precision | None, Effect.EXPORTED] = Field(
        None,
        description="Precision of the exported weights. None means that of the base model's files, "
        "or float32 for a model from scratch. Adapters alone are float32.",
    )
    dropout: Annotated[DropoutConfig, IfSet()] = DropoutConfig()
    fusion: Annotated[FusionConfig, IfSet()] = FusionConfig()
    adapter: AdapterConfig = AdapterConfig()

    @field_validator("added_tokens")
    @classmethod
    def _are_tokens(cls, tokens: list[str]) -> list[str]:
        for token, count in Counter(tokens).items():
            if not token.strip():
                raise ValueError(f"{token!r} is only white space: leave it out")
            if count > 1:
                raise ValueError(f"{token!r} is listed {count} times: list it once")
        return tokens

    @property
    def has_default_framework(self) -> bool:
        """Whether steadytrain's own loop trains it with PyTorch, and not another framework."""
        return bool(self.framework == type(self).model_fields["framework"].default)

    @field_validator("framework")
    @classmethod
    def _known_framework(cls, framework: str) -> str:
        if framework != cls.model_fields["framework"].default:
            check_plugins(plugins.TRAINERS, [framework])
        return framework

    @model_validator(mode="after")
    def _has_a_start(self) -> ModelConfig:
        fused = (self.fusion.image or self.fusion.image_base) and not self.config
        if self.base is None and "model_type" not in self.config and not fused:
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
                "it cannot be combined with model.base, which has its own configuration",
                "leave out one of the two",
            )
        return self

    @model_validator(mode="after")
    def _has_such_dropout(self) -> ModelConfig:
        if self.base is not None:
            return self
        family = str(self.config.get("model_type"))
        if problem := dropout_problem(self.dropout, family):
            value = float(problem.value)
            raise at_odds(problem.field, value, problem.message, problem.remedy)
        fields = dropout_fields(self.dropout, family)
        if twice := sorted(fields.keys() & self.config.keys()):
            raise at_odds(
                f"model.config.{twice[0]}",
                self.config[twice[0]],
                "model.dropout sets the same field",
                "leave one of the two out",
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
                message="it applies only to the code of a model.base",
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
