"""From a model's address to a local folder with its files.

Addresses: a folder, s3://BUCKET/PREFIX, hub:NAME, models:/NAME@ALIAS or
models:/NAME/VERSION of MLflow, package:NAME/PATH of an installed Python package.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import value_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.storage import S3Storage
from steadytrain.components.shared.workspace import Workspace


def resolve_model(address: str, config: RunConfig) -> Path:
    """The local folder of a model or a tokenizer, fetched where it lies elsewhere.

    Raises:
        BadInput: there is no such model, or it may not be read.
        StorageError: storage failed.
    """
    scheme, _, rest = address.partition(":")
    if scheme == "package":
        return _existing(package_folder(rest), address)
    if scheme in _FETCHERS:
        return _FETCHERS[scheme](address, config)
    return _existing(Path(address).expanduser(), address)


def package_folder(path: str) -> Path:
    """Folder of NAME or NAME/SUB/PATH of an installed Python package; not imported.

    Raises:
        BadInput: no package of that name is installed.
    """
    name, _, inner = path.partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise BadInput(
            f"package:{path}: no Python package {name!r} is installed",
            remedy=f"install it (pip install {name.replace('_', '-')}), or give a folder",
        )
    return Path(next(iter(spec.submodule_search_locations))) / inner


def _existing(folder: Path, address: str) -> Path:
    if not folder.is_dir():
        raise BadInput(
            f"model {address!r}: no folder {folder}",
            remedy="give a folder that exists, s3://..., hub:NAME, models:/NAME@ALIAS "
            "or package:NAME/PATH",
        )
    return folder.resolve()


def _from_s3(address: str, config: RunConfig) -> Path:
    storage = S3Storage(address)
    names = storage.list()
    if not names:
        raise BadInput(
            f"model {address!r}: nothing lies there", remedy="give the prefix of the model's files"
        )
    target = _cache(config, address)
    for name in names:
        if not (target / name).is_file():
            storage.download(name, target / name)
    return target


def _from_hub(address: str, config: RunConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = address.removeprefix("hub:")
    try:
        return Path(
            snapshot_download(
                name,
                revision=config.model.revision,
                ignore_patterns=["*.bin", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "original/*"],
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise BadInput(
            f"model {address!r} cannot be fetched: {type(error).__name__}",
            remedy="check the name and the network; a private model needs HF_TOKEN in the "
            "environment, a machine without network a folder",
        ) from error


def _from_mlflow(address: str, config: RunConfig) -> Path:
    """The files of a registered model: Transformers' model and tokenizer in one folder."""
    import mlflow

    from steadytrain.components.shared.tracking import use_tracking

    use_tracking(config, Workspace.of(config))
    version = mlflow.MlflowClient().get_model_version_download_uri
    name, _, tail = address.removeprefix("models:/").partition("@")
    try:
        if tail:
            number = mlflow.MlflowClient().get_model_version_by_alias(name, tail).version
        else:
            name, _, number = name.partition("/")
        origin = version(name, str(number))
        target = _cache(config, origin)
        if not (target / "config.json").is_file():
            _assemble(Path(mlflow.artifacts.download_artifacts(f"models:/{name}/{number}")), target)
    except mlflow.exceptions.MlflowException as error:
        raise BadInput(
            f"model {address!r} cannot be read from the registry: {error.error_code}",
            remedy="give models:/NAME@ALIAS or models:/NAME/VERSION of a version that exists",
        ) from error
    return target


def _assemble(logged: Path, target: Path) -> None:
    """MLflow's transformers flavour keeps model and tokenizer apart; a base has them together."""
    parts = [logged / "model", *sorted((logged / "components").glob("*"))]
    for part in parts:
        if part.is_dir():
            shutil.copytree(part, target, dirs_exist_ok=True)


def _cache(config: RunConfig, address: str) -> Path:
    return Workspace.of(config).downloads / value_digest(address)[:16]


_FETCHERS = {"s3": _from_s3, "hub": _from_hub, "models": _from_mlflow}
