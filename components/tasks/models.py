"""Transformers models for training: loaded from a folder, or built from scratch by a configuration.

Weights are float32 whatever the files contain, except for frozen weights next to adapters. The
training loop handles precision.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from steadytrain.components.shared.config import AdapterConfig, RunConfig
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.foreign import foreign
from steadytrain.components.shared.model_source import resolve_config, resolve_model
from steadytrain.components.shared.records import DataRecord
from steadytrain.components.shared.remote_code import has_code, may_run_code, needs_code
from steadytrain.components.tasks.encoding.tokens import load_tokenizer
from steadytrain.components.tasks.frozen_parts import lighten, quantized_modules
from steadytrain.components.tasks.loaded_weights import (
    check_complete,
    new_modules,
    note_dtype,
    note_new_weights,
)
from steadytrain.components.tasks.model_fields import add_split, unknown_fields
from steadytrain.components.techniques.dropout import dropout_fields


@torch.no_grad()
def add_tokens(model: Any, tokenizer: Any, tokens: Sequence[str]) -> None:
    """Give a model rows for new tokens: each is the mean of all tokens that it had before.

    So the other tokens stay almost as likely as they were (Hewitt 2021, "Initializing New Word
    Embeddings for Pretrained Language Models"). Random rows could take all of the probability.

    A model may have more rows than its tokenizer has tokens. New tokens then take some of these.
    """
    new = tokenizer.convert_tokens_to_ids(list(tokens))
    if max(new) >= model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(max(new) + 1, mean_resizing=False)
    head = model.get_output_embeddings()
    tables = [model.get_input_embeddings().weight]
    if head is not None:
        tables += [head.weight, *([] if head.bias is None else [head.bias])]
    for table in tables:
        table[new] = table[: min(new)].float().mean(0).to(table.dtype)


# Choose the parts of a base model to load into host memory instead of the GPU.
#
# A 4-bit base model is quantized on the GPU while it is loaded. Parts that stay on the host, or
# that are quantized later, would need memory there that a small GPU does not have.

Device = int | str
Places = dict[str, Device]
"""Devices of modules and parameters by name, as Transformers expects them. "" is the full model."""


def places(
    auto: Any, folder: Path, adapter: AdapterConfig, device: Device, *, run_code: bool
) -> Places:
    """Return the device to load each part of the model to.

    Args:
        auto: Transformers' auto class for the kind of model.
        device: device of everything that does not stay on the host.
        run_code: whether Python code next to the model may run.
    """
    host, quantized = adapter.frozen_embeddings == "host", adapter.frozen_head != "as_loaded"
    if not (host or quantized):
        return {"": device}
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=run_code)
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=run_code)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    kept = [embedding] if host else []
    if quantized and head is not None and (host or head.weight is not embedding.weight):
        kept.append(head)
    return _places(model, "", kept, device)


def _places(module: Any, name: str, kept: list[Any], device: Device) -> Places:
    """Return the fewest names that separate the kept parts from the rest.

    accelerate places everything under a name.
    """
    if any(module is part for part in kept):
        return {name: "cpu"}
    if not any(inner is part for inner in module.modules() for part in kept):
        return {name: device}
    before = f"{name}." if name else ""
    result: Places = {
        f"{before}{parameter}": device for parameter, _ in module.named_parameters(recurse=False)
    }
    for inner, child in module.named_children():
        result |= _places(child, f"{before}{inner}", kept, device)
    return result


def leave_on_the_host(model: Any, device: Device) -> None:
    """Stop moving the parts on the host to the GPU in each forward pass.

    Args:
        device: device of all other parts.
    """
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)
    # accelerate and Transformers use this to recognize models that are spread over devices.
    model.hf_device_map = {"": device}


_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def build(
    auto: Any, config: RunConfig, data: DataRecord, tokenizer: Any, **settings: Any
) -> torch.nn.Module:
    """Return the model to train, checked against the data.

    On torch's device "meta", it has no weights: of a base model, only config.json is read.

    Args:
        auto: Transformers' auto class for the kind of model.
        tokenizer: None if the model reads no text.
        settings: further fields of the model's configuration.

    Raises:
        BadInput: the model cannot be used with this data.
    """
    if torch.get_default_device().type == "meta" and config.model.base:
        return _outline(auto, config, settings)
    folder = resolve_model(config.model.base, config) if config.model.base else None
    if config.training.attention != "auto":
        settings |= {"attn_implementation": attention_name(config.training.attention)}
    if config.model.dropout.places:
        settings |= dropout_fields(config.model.dropout, _family(config, folder))
    with _foreign(folder, config):
        if folder is None:
            model = _from_scratch(auto, config.model.config, tokenizer, settings)
        else:
            how = _precision(config) | {"trust_remote_code": may_run_code(folder, config)}
            if "device_map" in how:
                model = _quantized(auto, folder, tokenizer, settings, how, config.model.adapter)
            else:
                model = _loaded(auto, folder, tokenizer, settings, how)
        if folder is not None and config.model.added_tokens:
            add_tokens(model, tokenizer, config.model.added_tokens)
        if tokenizer is not None:
            _check_vocabulary(model, tokenizer)
            _check_length(model, data.sequence_length)
        add_split(model, data.split_digest)
        # Do this right away: if parts of the model are on the host, it cannot run before.
        lighten(model, config.model.adapter)
    return model


def attention_name(attention: str) -> str:
    """Return Transformers' name of `training.attention`."""
    return "flex_attention" if attention == "flex" else attention


def _outline(auto: Any, config: RunConfig, settings: Mapping[str, Any]) -> torch.nn.Module:
    """Return the structure of the base model. Code that comes with it does not run.

    Raises:
        BadInput: that is not possible.
    """
    folder = resolve_config(str(config.model.base), config)
    with _foreign(folder, config):
        architecture = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **settings
        )
        model: torch.nn.Module = auto.from_config(architecture, trust_remote_code=False)
    return model


def load_frozen(
    auto: Any,
    address: str | None,
    field: str,
    config: RunConfig,
    data: DataRecord,
    tokenizer: Any,
    *,
    dtype: torch.dtype | None = None,
) -> torch.nn.Module:
    """Return another model that only answers: frozen, in evaluation mode, in host memory.

    Its weights have the precision of the forward pass. Code that comes with it never runs, unless
    it is the code of model.base.

    Args:
        auto: Transformers' auto class for the kind of model.
        field: names the address in errors.
        dtype: of the weights, instead.

    Raises:
        BadInput: the model cannot be used with this data.
    """
    folder = resolve_model(str(address), config)
    is_base = address == config.model.base
    if has_code(folder) and not is_base:
        raise BadInput(
            f"{field} = {address!r}: it comes with code, which runs for model.base only",
            remedy="use a model that Transformers has built in",
        )
    code = is_base and may_run_code(folder, config)
    how = {"dtype": dtype or _forward_type(config), "trust_remote_code": code}
    with foreign(
        f"{field}: {folder} cannot be loaded",
        "give a folder that Transformers' from_pretrained reads",
    ):
        model = _loaded(auto, folder, tokenizer, {}, how, field)
        if is_base and config.model.added_tokens:
            add_tokens(model, tokenizer, config.model.added_tokens)
        _check_vocabulary(model, tokenizer, field)
        _check_length(model, data.sequence_length, field)
    return model.eval().requires_grad_(False)


def _family(config: RunConfig, folder: Path | None) -> str:
    if folder is None:
        return str(config.model.config["model_type"])
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type"))


def _foreign(folder: Path | None, config: RunConfig) -> AbstractContextManager[None]:
    if folder is None:
        return foreign(
            "model.config cannot be built",
            "change the named field; Transformers' documentation of "
            f"{config.model.config.get('model_type')!r} lists its values",
        )
    names = ["config.json", *sorted(path.name for path in _weights(folder))[:3]]
    return foreign(
        f"model.base: {folder} cannot be loaded (from {', '.join(names)})",
        "give a folder that Transformers' from_pretrained reads",
    )


def _weights(folder: Path) -> Iterator[Path]:
    return (path for pattern in _WEIGHTS for path in folder.glob(pattern))


def _from_scratch(
    auto: Any, fields: Mapping[str, Any], tokenizer: Any, settings: Mapping[str, Any]
) -> torch.nn.Module:
    filled = {**_tokens(tokenizer), **settings, **fields}
    if problems := [*unknown_fields(fields)]:
        raise ConfigError(problems)
    model: torch.nn.Module = auto.from_config(
        AutoConfig.for_model(**filled), dtype=torch.float32, trust_remote_code=False
    )
    return model


def _tokens(tokenizer: Any) -> dict[str, Any]:
    """Return the fields of a model that its tokenizer determines."""
    if tokenizer is None:
        return {}
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in special}}


def _loaded(
    auto: Any,
    folder: Path,
    tokenizer: Any,
    settings: Mapping[str, Any],
    how: Mapping[str, Any],
    field: str = "model.base",
) -> torch.nn.Module:
    if not any(_weights(folder)):
        raise BadInput(
            f"{field}: {folder} contains no weights ({' or '.join(_WEIGHTS)})",
            remedy="give a folder with weights, or set model.config to train from scratch",
        )
    if tokenizer is not None:
        _check_tokenizer(folder, tokenizer, field)
    # A model without a head does without the pooler too.
    new_head = "num_labels" in settings or auto is AutoModel
    try:
        model, report = auto.from_pretrained(
            folder,
            **how,
            local_files_only=True,
            ignore_mismatched_sizes=new_head,
            output_loading_info=True,
            **settings,
        )
    except MemoryError:
        raise
    except Exception as error:
        if has_code(folder) and not how["trust_remote_code"]:
            raise needs_code(folder) from error
        raise
    check_complete(model, report, folder, new_head=new_head, field=field)
    loaded: torch.nn.Module = model
    resized = [name for name, *_ in report["mismatched_keys"]]
    note_new_weights(loaded, report["missing_keys"], resized)
    note_dtype(loaded, folder)
    return loaded


def _quantized(
    auto: Any,
    folder: Path,
    tokenizer: Any,
    settings: Mapping[str, Any],
    how: Mapping[str, Any],
    adapter: AdapterConfig,
) -> torch.nn.Module:
    """Load the model in 4 or 8 bits, on the device but for the parts that belong in host memory."""
    from bitsandbytes.nn.modules import Linear4bit

    device, run_code = how["device_map"][""], how["trust_remote_code"]
    there = places(auto, folder, adapter, device, run_code=run_code)
    spread = len(set(there.values())) > 1
    how["quantization_config"].llm_int8_enable_fp32_cpu_offload = spread
    drawn = torch.get_rng_state()
    model: Any = _loaded(auto, folder, tokenizer, settings, {**how, "device_map": there})
    if new := quantized_modules(model, new_modules(model)):
        # Such as a classifier. It is trained, so it keeps full precision.
        kept = [*model.hf_quantizer.modules_to_not_convert, *new]
        how["quantization_config"].llm_int8_skip_modules = kept
        # A device may have memory for one of them only.
        del model
        torch.set_rng_state(drawn)
        model = _loaded(auto, folder, tokenizer, settings, {**how, "device_map": there})
    if spread:
        leave_on_the_host(model, device)
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            # In a forward pass without gradients, a CPU with AVX512-BF16 would repack the weights
            # for good: their scales lose bits, and later passes have no gradients.
            layer.support_avx512bf16_for_cpu = False
    loaded: torch.nn.Module = model
    return loaded


def _precision(config: RunConfig) -> dict[str, Any]:
    """Return the settings for loading a base model's weights.

    Frozen weights need no more bits than they are computed with. 4 bits follow QLoRA (Dettmers et
    al. 2023): NF4 or FP4 with quantized scales; 8 bits follow LLM.int8() (Dettmers et al. 2022).
    They are on this rank's GPU or the CPU. What isn't quantized (embeddings, head, norms) has the
    precision of the forward pass; on a GPU, it is in 16 bits.
    """
    kind = config.model.adapter.kind
    if kind == "none":
        return {"dtype": torch.float32}
    if kind == "lora":
        return {"dtype": _forward_type(config)}
    on_gpu = torch.cuda.is_available() and config.compute.device != "cpu"
    computed = _forward_type(config)
    if on_gpu and computed == torch.float32:
        computed = torch.bfloat16
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=config.model.adapter.quantization != "int8",
        load_in_8bit=config.model.adapter.quantization == "int8",
        bnb_4bit_quant_type=config.model.adapter.quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed,
    )
    device = torch.cuda.current_device() if on_gpu else "cpu"
    return {"dtype": computed, "quantization_config": quantization, "device_map": {"": device}}


def _forward_type(config: RunConfig) -> torch.dtype:
    """Return the precision of the forward pass."""
    if config.training.bf16:
        return torch.bfloat16
    return torch.float16 if config.training.fp16 else torch.float32


def _check_tokenizer(folder: Path, tokenizer: Any, field: str) -> None:
    """Check that the tokens of the model's tokenizer, if any, have the same ids as in the data."""
    if not (folder / "tokenizer_config.json").is_file():
        return
    vocabulary = load_tokenizer(folder, field).get_vocab()
    used = tokenizer.get_vocab()
    wrong = [token for token, index in vocabulary.items() if used.get(token) != index]
    if wrong:
        raise BadInput(
            f"{field}: {len(wrong)} of the {len(vocabulary)} tokens of {folder} have another id in "
            f"the data's tokenizer, such as {wrong[0]!r}",
            remedy="leave model.tokenizer out, so that the base model's own is used"
            if field == "model.base"
            else f"prepare the data with its tokenizer: set model.tokenizer to {folder}",
        )


def _check_vocabulary(model: Any, tokenizer: Any, field: str = "the model") -> None:
    size = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > size:
        raise BadInput(
            f"the tokenizer has {len(tokenizer)} tokens, {field}'s vocabulary {size}",
            remedy="use the model's own tokenizer, or leave model.config.vocab_size out",
        )


def _check_length(model: Any, length: int, field: str = "the model") -> None:
    limit = _longest(model)
    if limit is not None and length > limit:
        raise BadInput(
            f"data.sequence_length = {length}: {field} takes at most {limit} tokens",
            remedy=f"set it to {limit} or less, or use a model with more positions",
        )


def _longest(model: Any) -> int | None:
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    # XLNet, for example, has no limit and says -1.
    if limit is None or limit < 0:
        return None
    # RoBERTa and related models count positions from the padding index.
    offsets = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    return limit - max(offsets, default=0)
