"""Resolve a model's address to a local folder, and record the content that was used."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import BASE_FILE, MODEL_FILES, files_digest, value_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.lease import lock
from steadytrain.components.shared.paths import below, check_distinct, checked, local_path
from steadytrain.components.shared.storage import S3Storage
from steadytrain.components.shared.storage.local import local_errors, sync_folder
from steadytrain.components.shared.storage.s3 import ObjectInfo
from steadytrain.components.shared.workspace import Workspace

WAIT_SECONDS = 6 * 3600.0
"""How long to wait for another process that downloads the same folder. The lock of a dead process
is freed."""


def fetched(downloads: Path, version: Any, fetch: Callable[[Path], None]) -> Path:
    """Return the folder for a version of something. Download it unless an earlier call has done so.

    Args:
        downloads: the folder that holds all downloads.
        version: plain data that changes whenever the content does.
        fetch: fills an empty temporary folder. Only one process at a time calls it. The folder gets
            its final name after `fetch` has returned.

    Raises:
        RunBusy: if another process has been downloading it for WAIT_SECONDS.
        StorageError: if the folder cannot be written.
    """
    name = value_digest(version)[:32]
    target = downloads / name
    if target.is_dir():
        return target
    with local_errors("write", target):
        downloads.mkdir(parents=True, exist_ok=True)
    with lock(str(downloads), f".{name}", wait_seconds=WAIT_SECONDS):
        if target.is_dir():
            return target
        partial = downloads / f".partial-{name}"
        with local_errors("write", target):
            # A killed process may have left a partial download.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        try:
            fetch(partial)
            with local_errors("write", target):
                partial.rename(target)
                sync_folder(downloads)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


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
    storage, objects = _listed(address)
    origin = f"model {address!r}"
    names = [checked(item.name, origin=origin) for item in objects]
    check_distinct(names, origin=origin)

    def fetch(folder: Path) -> None:
        for name in names:
            storage.download(name, below(folder, name, origin=origin))

    return fetched(Workspace.of(config).downloads, _version(address, objects), fetch)


def _listed(address: str) -> tuple[S3Storage, Sequence[ObjectInfo]]:
    storage = S3Storage(address)
    objects = storage.describe()
    if not objects:
        raise BadInput(
            f"model {address!r}: no files found there",
            remedy="give the prefix of the model's files",
        )
    return storage, objects


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
    configured = address == (config.model.base or config.model.tokenizer)
    revision = config.model.revision if configured else None
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
    """Return a folder with a registered Transformers model and its tokenizer, or one of images."""
    uri, origin = _registered(address, config)
    with _registry_errors(address):
        return fetched(
            Workspace.of(config).downloads, origin, lambda folder: _assemble(uri, folder)
        )


def _registered(address: str, config: RunConfig) -> tuple[str, str]:
    """Return the address's current version as models:/NAME/VERSION, and where its files are."""
    from steadytrain.components.shared.tracking import read_version

    client, version = read_version(config, Workspace.of(config), address)
    with _registry_errors(address):
        origin = client.get_model_version_download_uri(version.name, version.version)
    return f"models:/{version.name}/{version.version}", origin


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
    images = logged / "artifacts" / "model"
    if (images / "config.json").is_file():
        # A model of images is logged as it was exported.
        shutil.copytree(images, folder, dirs_exist_ok=True)
        shutil.rmtree(scratch)
        return
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


def base_content(config: RunConfig) -> str:
    """Return `content_of` for the base model; "" if training starts from scratch.

    Raises:
        BadInput, StorageError: the same as `content_of`.
    """
    return content_of(config.model.base, config) if config.model.base else ""


def other_contents(config: RunConfig) -> dict[str, str]:
    """Return `content_of` for the models that training reads besides the base model, by role.

    They are the teacher, the grader, which is the reference model of a curriculum, and the
    image_encoder. Those that are not configured are left out.

    Raises:
        BadInput, StorageError: the same as `content_of`.
    """
    roles = {
        "teacher": config.training.distillation.teacher,
        "grader": config.training.curriculum.model,
        "image_encoder": config.model.fusion.image_base,
    }
    return {role: content_of(address, config) for role, address in roles.items() if address}


def note_base(folder: Path, config: RunConfig) -> None:
    """Write a note next to adapters that identifies their base model."""
    content = {"address": config.model.base, "content": base_content(config)}
    (folder / BASE_FILE).write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")


def name_base(folder: Path, config: RunConfig) -> None:
    """Make adapters name a base model on the hub by its name, not by a folder of this machine."""
    base, path = config.model.base or "", folder / "adapter_config.json"
    if not base.startswith("hub:"):
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    content["base_model_name_or_path"] = base.removeprefix("hub:")
    content["revision"] = base_content(config).removeprefix("commit ")
    path.write_text(f"{json.dumps(content, indent=2)}\n", encoding="utf-8")


def check_base(folder: Path, config: RunConfig) -> None:
    """Refuse to add adapters to a base model other than the one they were trained with.

    Raises:
        BadInput: if the base has changed.
        StorageError: if the base cannot be checked.
    """
    note = folder / BASE_FILE
    if not note.is_file():
        # Exported by a version that did not write this file.
        return
    trained, now = json.loads(note.read_text(encoding="utf-8"))["content"], base_content(config)
    if trained != now:
        raise BadInput(
            f"model.base = {config.model.base!r}: its files have changed since the adapters in "
            f"{folder} were trained ({trained} -> {now})",
            remedy="put the files back as they were, or train again under another run name "
            "(run: ...); models:/NAME/VERSION and hub: with model.revision cannot change",
        )
