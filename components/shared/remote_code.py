"""Python code that comes with a model. It runs only if the configuration pins that code.

Transformers imports such code for architectures that it does not support itself. By default
(model.trust_remote_code: false) none of it ever runs. If enabled, model.revision pins the code of
model.base: by the commit of a hub model, or by a digest of the Python files of any other model. The
exported model and the champion of an earlier run contain copies of these files. Copies may run too.
A file with any other content must not run, wherever it comes from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.model_source import resolve_model

_CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json")
_REFERENCE = re.compile(r"[A-Za-z_]\w*(/[A-Za-z_]\w*)*\.[A-Za-z_]\w*")
"""A class in a file of the same folder. `REPO--module.Class` refers to another repository."""


def may_run_code(folder: Path, config: RunConfig) -> bool:
    """Return whether Transformers may import a model's code, for its `trust_remote_code` option.

    Raises:
        BadInput: if model.trust_remote_code is on but the code is not what model.revision pins.
    """
    if not (config.model.trust_remote_code and _auto_maps(folder)):
        return False
    base = resolve_model(config.model.base or "", config)
    if not (config.model.base or "").startswith("hub:"):
        _check_digest(base, config)
    _check_references(folder)
    pinned = set(_digests(base).values())
    foreign = sorted(name for name, digest in _digests(folder).items() if digest not in pinned)
    if foreign:
        raise BadInput(
            f"{folder}: {foreign[0]} is not part of the code that model.revision pins",
            remedy="remove it, or set model.trust_remote_code to false",
        )
    return True


def check_code(folder: Path, config: RunConfig) -> None:
    """Reject a base model that cannot be loaded without code that must not run.

    Raises:
        BadInput: the message names the field, and the value that would pin the code.
    """
    if not may_run_code(folder, config) and _is_foreign(folder):
        raise needs_code(folder)


def needs_code(folder: Path) -> BadInput:
    """Return the error for a model whose code must not run."""
    return BadInput(
        f"{folder} needs its own Python code ({', '.join(_digests(folder)) or 'elsewhere'}), "
        "and model.trust_remote_code is false",
        remedy="use a model that is built into Transformers; or read that code, then set "
        "model.trust_remote_code: true and model.revision to the commit of a hub model, "
        f"or else to {code_digest(folder)}",
    )


def has_code(folder: Path) -> bool:
    """Return whether a model's folder refers to its own code. Often it also loads without it."""
    return bool(_auto_maps(folder))


def code_digest(folder: Path) -> str:
    """Return a digest of the names and contents of a folder's Python files, for model.revision."""
    content = json.dumps(_digests(folder), sort_keys=True).encode()
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _check_digest(base: Path, config: RunConfig) -> None:
    digest = code_digest(base)
    if config.model.revision != digest:
        raise BadInput(
            f"model.revision = {config.model.revision!r}: with model.trust_remote_code it must pin "
            f"the code of {config.model.base} ({', '.join(_digests(base)) or 'no Python file'})",
            remedy=f"read that code; if it may run, set model.revision to {digest}",
        )


def _check_references(folder: Path) -> None:
    for auto_map in _auto_maps(folder):
        for reference in _references(auto_map):
            if not _REFERENCE.fullmatch(reference):
                raise BadInput(
                    f"{folder}: auto_map refers to {reference!r}, which model.revision does not "
                    "pin: it is not a class in a file of this folder",
                    remedy="put the code into its folder, or set model.trust_remote_code to false",
                )
    if (folder / "adapter_config.json").is_file():
        raise BadInput(
            f"{folder} contains adapters, whose base model is elsewhere and may bring other code",
            remedy="merge the adapters, or set model.trust_remote_code to false",
        )


def _is_foreign(folder: Path) -> bool:
    """Return whether Transformers does not know the model's type."""
    config = _read(folder / "config.json")
    if "AutoConfig" not in (config.get("auto_map") or {}):
        return False
    # Import late: it loads torch if that is installed.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return config.get("model_type") not in CONFIG_MAPPING_NAMES


def _auto_maps(folder: Path) -> list[Any]:
    maps = (_read(folder / name).get("auto_map") for name in _CONFIGS)
    return [auto_map for auto_map in maps if auto_map]


def _references(auto_map: Any) -> Iterator[str]:
    """Yield the classes in an auto_map. Tokenizers have pairs, in which either may be null."""
    if isinstance(auto_map, str):
        yield auto_map
    elif isinstance(auto_map, Mapping | list):
        for item in auto_map.values() if isinstance(auto_map, Mapping) else auto_map:
            yield from _references(item)


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each Python file, by its path in the folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.py"))
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
