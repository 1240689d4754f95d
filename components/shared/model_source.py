"""Resolve a model's address to a local folder with its files.

An address is a folder, s3://BUCKET/PREFIX, hub:NAME, models:/NAME@ALIAS or models:/NAME/VERSION in
MLflow, or package:NAME/PATH in an installed Python package.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import MODEL_FILES, files_digest, value_digest
from steadytrain.components.shared.downloads import fetched
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.paths import below, check_distinct, checked, local_path
from steadytrain.components.shared.storage import S3Storage
from steadytrain.components.shared.storage.s3 import ObjectInfo
from steadytrain.components.shared.workspace import Workspace

_PROJECTS: Final = {"sklearn": "scikit-learn"}
"""What to install for packages in the presets that have another name on PyPI."""


def resolve_model(address: str, config: RunConfig) -> Path:
    """Return the local folder of a model or tokenizer. Download it if it is remote.

    Raises:
        BadInput: if there is no such model, or it must not be read.
        StorageError: if storage failed.
    """
    scheme, _, rest = address.partition(":")
    if scheme == "package":
        return _existing(package_folder(rest), address)
    if scheme in _FETCHERS:
        return _FETCHERS[scheme](address, config)
    return _existing(local_path(address), address)


def resolve_config(address: str, config: RunConfig) -> Path:
    """Return a folder with a model's config.json. Of a hub model, only that file is downloaded.

    Raises:
        BadInput, StorageError: the same as `resolve_model`.
    """
    if address.startswith("hub:"):
        return _snapshot(address, config, allow_patterns=["config.json"])
    return resolve_model(address, config)


def content_of(address: str, config: RunConfig) -> str:
    """Return an id of the content of an address: equal exactly if the model's files are equal.

    Only a hub model's config.json is downloaded for this. A local folder's weights are read.

    Raises:
        BadInput, StorageError: the same as `resolve_model`.
    """
    scheme = address.partition(":")[0]
    if scheme == "s3":
        return f"listing {value_digest(_version(address, _listed(address)[1]))}"
    if scheme == "hub":
        return f"commit {resolve_config(address, config).name}"
    if scheme == "models":
        return " at ".join(_registered(address, config))
    return f"sha256 {files_digest(resolve_model(address, config), MODEL_FILES)}"


def package_folder(path: str) -> Path:
    """Return the folder of NAME or NAME/SUB/PATH in an installed Python package.

    The package is not imported.

    Raises:
        BadInput: if no package with this name is installed, or the path leads out of it.
    """
    name, _, inner = path.partition("/")
    # The program itself is a module without a folder.
    spec = find_spec(name) if name.isidentifier() and name != "__main__" else None
    if spec is None or not spec.submodule_search_locations:
        raise BadInput(
            f"package:{path}: no Python package {name!r} is installed",
            remedy=f"pip install {project_of(name)}, or give a folder",
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    inner = inner.rstrip("/")
    return below(folder, inner, origin=f"package:{path}") if inner else folder


def project_of(package: str) -> str:
    """Return what to install for a Python package."""
    return _PROJECTS.get(package, package.replace("_", "-"))


def _existing(folder: Path, address: str) -> Path:
    # Path.is_dir raises where an address is too long for a path or may not be looked at.
    if not os.path.isdir(folder):  # noqa: PTH112
        raise BadInput(
            f"model {address!r}: no folder {folder}",
            remedy="give a folder that exists, s3://..., hub:NAME, models:/NAME@ALIAS "
            "or package:NAME/PATH",
        )
    return folder.resolve()


def _from_s3(address: str, config: RunConfig) -> Path:
    storage, found = _listed(address)
    origin = f"model {address!r}"
    names = [checked(item.name, origin=origin) for item in found]
    check_distinct(names, origin=origin)

    def fetch(folder: Path) -> None:
        for name in names:
            storage.download(name, below(folder, name, origin=origin))

    return fetched(Workspace.of(config).downloads, _version(address, found), fetch)


def _listed(address: str) -> tuple[S3Storage, Sequence[ObjectInfo]]:
    storage = S3Storage(address)
    found = storage.describe()
    if not found:
        raise BadInput(
            f"model {address!r}: no files found there",
            remedy="give the prefix of the model's files",
        )
    return storage, found


def _version(address: str, found: Sequence[ObjectInfo]) -> list[Any]:
    return [address, *([item.name, item.size, item.tag] for item in found)]


def _from_hub(address: str, config: RunConfig) -> Path:
    unwanted = ["*.bin", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "original/*"]
    return _snapshot(address, config, ignore_patterns=unwanted)


def _snapshot(address: str, config: RunConfig, **patterns: Any) -> Path:
    """Return the snapshot folder, named after its commit; offline, the one downloaded last."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # A tokenizer from another repository, or a teacher, has its own commits.
    own = address == (config.model.base or config.model.tokenizer)
    revision = config.model.revision if own else None
    try:
        name = address.removeprefix("hub:")
        return Path(snapshot_download(name, revision=revision, **patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise BadInput(
            f"model {address!r} cannot be fetched: {type(error).__name__}",
            remedy="check the name and the network; a private model needs HF_TOKEN in the "
            "environment, a machine without network access needs a folder",
        ) from error


def _from_mlflow(address: str, config: RunConfig) -> Path:
    """Return a folder with a registered Transformers model and its tokenizer."""
    uri, origin = _registered(address, config)
    with _registry_errors(address):
        return fetched(
            Workspace.of(config).downloads, origin, lambda folder: _assemble(uri, folder)
        )


def _registered(address: str, config: RunConfig) -> tuple[str, str]:
    """Return the address's current version as models:/NAME/VERSION, and where its files are."""
    from steadytrain.components.shared.tracking import read_registry

    try:
        client = read_registry(config, Workspace.of(config))
    except BadInput as error:
        raise BadInput(f"model {address!r}: {error.message}", remedy=error.remedy) from error
    name, _, tail = address.removeprefix("models:/").partition("@")
    with _registry_errors(address):
        if tail:
            number = client.get_model_version_by_alias(name, tail).version
        else:
            name, _, number = name.partition("/")
        origin = client.get_model_version_download_uri(name, str(number))
    return f"models:/{name}/{number}", origin


@contextlib.contextmanager
def _registry_errors(address: str) -> Iterator[None]:
    import mlflow

    try:
        yield
    except mlflow.exceptions.MlflowException as error:
        raise BadInput(
            f"model {address!r} cannot be read from the registry: {error.error_code}",
            remedy="give models:/NAME@ALIAS or models:/NAME/VERSION of a version that exists",
        ) from error


def _assemble(uri: str, folder: Path) -> None:
    """Merge model and tokenizer into one folder. MLflow's transformers flavor separates them."""
    import mlflow

    scratch = folder / ".logged"
    scratch.mkdir()
    logged = Path(mlflow.artifacts.download_artifacts(uri, dst_path=str(scratch)))
    if not (logged / "model" / "config.json").is_file():
        raise BadInput(
            f"model {uri!r} has no model/config.json: it is not a logged Transformers model",
            remedy="give a version that steadytrain or mlflow.transformers has logged",
        )
    for part in (logged / "model", *sorted((logged / "components").glob("*"))):
        if part.is_dir():
            shutil.copytree(part, folder, dirs_exist_ok=True)
    shutil.rmtree(scratch)


_FETCHERS = {"s3": _from_s3, "hub": _from_hub, "models": _from_mlflow}
