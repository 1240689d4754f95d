"""Models that MLflow serves with code of their own, which is exported with them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.digest import file_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tasks.base import Components, Part

NUMBER_COLUMNS: Final = "steadytrain.number_columns"
"""Metadata of a model: the columns that hold numbers, as JSON."""
_FILES: Final = "steadytrain.files"
"""Metadata of a model: the digests of its files by their paths in the logged folder, as JSON."""
_ARTIFACT: Final = "model"
_SERVED: Final = Path(__file__).with_name("served_model.py")


@contextmanager
def readable(folder: Path, kind: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise BadInput if the code within cannot read the model in a folder.

    Args:
        kind: what the model is of.
        errors: that the code raises too if it cannot.
    """
    unreadable: tuple[type[Exception], ...] = OSError, ValueError, KeyError, *errors
    try:
        yield
    except unreadable as error:
        raise BadInput(
            f"{folder} has no model of {kind} that can be read: {error}",
            remedy="train it again, or restore the folder",
        ) from error


class ServedPackager(Part):
    """Logs exported folders to MLflow as pyfunc models, and loads them from there."""

    def load_exported(self, folder: Path) -> Components:
        raise NotImplementedError

    def load_logged(self, model_uri: str) -> Components:
        # Only the files: MLflow's own load_model would run the code that is registered with them.
        import mlflow

        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(mlflow.artifacts.download_artifacts(model_uri, dst_path=scratch))
            check_files(folder, model_uri)
            return self.load_exported(folder / "artifacts" / _ARTIFACT)

    def check_labels(self, labels: Sequence[str]) -> None:
        """Raise BadInput if a model's classes are not those of the data."""
        if list(labels) != self.data.labels:
            raise BadInput(
                f"the model predicts the classes {', '.join(labels) or 'of no column'}, and "
                f"the data have {', '.join(self.data.labels) or 'none'}",
                remedy="name the classes in data.labels, or register under another name",
            )

    def log_folder(
        self,
        folder: Path,
        *,
        name: str,
        inputs: Sequence[Any],
        example: Any,
        metadata: dict[str, str],
        packages: Sequence[str],
        outputs: Sequence[Any] = (),
        served: Path = _SERVED,
    ) -> str:
        """Log an exported folder, and return the model's URI.

        Args:
            inputs: the columns that the model reads, as mlflow.types.ColSpec.
            example: a data frame of a few records.
            packages: what the model needs, in the versions that are installed here.
            outputs: the columns of a prediction; empty stands for `prediction` and, for each class,
                `probability_CLASS`.
            served: the file with the pyfunc model that loads the folder. The default one needs a
                file `model.py` there, with a function `load`.
        """
        import mlflow
        from mlflow.models import ModelSignature
        from mlflow.types import ColSpec, DataType, Schema
        from mlflow.types.schema import AnyType

        labels = self.data.labels
        outputs = outputs or [
            ColSpec("string" if labels else "double", "prediction"),
            *(ColSpec("double", f"probability_{label}") for label in labels),
        ]
        numbers = [column.name for column in inputs if column.type == DataType.double]
        # MLflow takes no whole number for a "double", though a CSV file without a fraction has only
        # these. Models check numbers themselves.
        inputs = [
            ColSpec(AnyType(), column.name, required=column.required)
            if column.name in numbers
            else column
            for column in inputs
        ]
        logged = mlflow.pyfunc.log_model(
            name=name,
            python_model=str(served),
            artifacts={_ARTIFACT: str(folder)},
            signature=ModelSignature(Schema(inputs), Schema(list(outputs))),
            input_example=example,
            metadata={
                **metadata,
                NUMBER_COLUMNS: json.dumps(numbers),
                **digests_of({f"artifacts/{folder.name}": folder, served.name: served}),
            },
            # A local build's suffix, such as +cpu, is not a version that a package index has.
            pip_requirements=[
                f"{package}=={version(package).partition('+')[0]}" for package in packages
            ],
        )
        return str(logged.model_uri)


def check_files(folder: Path, address: str) -> None:
    """Compare the files of a logged model with what was logged, if it says what that was.

    Raises:
        BadInput: a file differs or is missing. Most damage would only change the predictions.
    """
    from mlflow.models import Model

    try:
        logged = json.loads((Model.load(folder).metadata or {}).get(_FILES, "{}")).items()
    except Exception as error:
        # What a damaged description raises can be anything.
        raise BadInput(
            f"{address} cannot be loaded: {type(error).__name__}: {str(error)[:500]}",
            remedy="restore its file MLmodel, or register the model again",
        ) from error
    wrong = [
        f"{name} {'differs from what was logged' if (folder / name).is_file() else 'is missing'}"
        for name, digest in logged
        if not (folder / name).is_file() or file_digest(folder / name) != digest
    ]
    if wrong:
        raise BadInput(
            f"{address} is damaged: {'; '.join(wrong)[:500]}",
            remedy="restore its files, or register the model again",
        )


def digests_of(parts: Mapping[str, Path]) -> dict[str, str]:
    """Return the metadata from which `check_files` knows the files of a model.

    Args:
        parts: folders and files by their paths in the logged folder.
    """
    digests = {
        (Path(name) / path.relative_to(part)).as_posix(): file_digest(path)
        for name, part in parts.items()
        for path in (part, *sorted(part.rglob("*")))
        # Whoever imports an exported module leaves its bytecode, which another Python replaces.
        if path.is_file() and path.parent.name != "__pycache__"
    }
    return {_FILES: json.dumps(digests)}
