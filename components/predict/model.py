"""A logged model as batch prediction uses it: what it reads of a record, and its answers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.tracking import import_mlflow, read_registry
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tabular.encoder import plain_value
from steadytrain.components.tabular.model import is_missing, plain_number
from steadytrain.components.tasks.encoding.fields import Defect, text_of

Kind = Literal["number", "text", "bytes", "any"]
_NUMBERS: Final = frozenset({"double", "float", "integer", "long"})
_OTHERS: Final[Mapping[str, Kind]] = {"string": "text", "binary": "bytes"}
_FORMS: Final = "NAME@ALIAS, models:/NAME/VERSION, or a folder with an MLmodel file"


@dataclass(frozen=True)
class Input:
    """A column that a model reads.

    name: as in the model's signature; "" if the model takes single texts.
    column: of the records.
    """

    name: str
    column: str
    kind: Kind
    required: bool

    def read(self, row: Mapping[str, Any]) -> Any:
        """Return a record's value, as the signature wants it; None if there is none.

        Raises:
            Defect: the value is of another kind, or required and missing.
        """
        if self.kind == "text" and self.required:
            return text_of(row, self.column)
        value = row.get(self.column)
        if self.kind == "bytes" and isinstance(value, bytes):
            return value
        value = plain_value(self.column, value)
        if is_missing(value):
            return self._missing()
        if self.kind == "bytes":
            raise Defect(
                "wrong_type", f"{self.column} is {str(value)[:80]!r}, not a file's content"
            )
        if self.kind == "any":
            return value
        if self.kind == "text":
            return str(value)
        number = plain_number(value)
        if math.isnan(number):
            raise Defect("wrong_type", f"{self.column} is {str(value)[:80]!r}, not a number")
        return number

    def _missing(self) -> None:
        if self.required:
            raise Defect("missing_field", f"{self.column} is absent, null or empty")


@dataclass(frozen=True)
class ServedModel:
    """A model that MLflow has loaded.

    address: models:/NAME/VERSION, or a folder.
    trained: the configuration of its run, if the registry knows it.
    """

    address: str
    inputs: Sequence[Input]
    trained: RunConfig | None
    loaded: Any

    @property
    def single(self) -> bool:
        """Whether it takes texts instead of columns."""
        return not self.inputs[0].name

    @property
    def reads_files(self) -> bool:
        """Whether a file, such as an image, is a record."""
        return any(item.kind == "bytes" for item in self.inputs)

    def value(self, row: Mapping[str, Any]) -> Any:
        """Return what the model takes of a record: a text, or the values by column.

        Raises:
            Defect: the model cannot take it.
        """
        if self.single:
            return self.inputs[0].read(row)
        found = {item.name: item.read(row) for item in self.inputs}
        if all(value is None for value in found.values()):
            columns = ", ".join(item.column for item in self.inputs)
            raise Defect("missing_field", f"none of its columns has a value: {columns[:200]}")
        return found

    def answers(self, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the predictions for values, as plain data by name.

        Raises:
            Exception: whatever the model raises.
            ValueError: it has not one answer for each value.
        """
        if self.single:
            result = self.loaded.predict(list(values))
        else:
            import pandas as pd

            result = self.loaded.predict(self._frame(pd, values))
        found = [_plain_answer(item) for item in _items(result)]
        if len(found) != len(values):
            raise ValueError(f"the model gave {len(found)} answers for {len(values)} records")
        return found

    def _frame(self, pd: Any, values: Sequence[Mapping[str, Any]]) -> Any:
        """Return values as a frame whose columns have the types of the signature."""
        types = {"number": "float64"}
        return pd.DataFrame(
            {
                item.name: pd.Series(
                    [value[item.name] for value in values], dtype=types.get(item.kind, object)
                )
                for item in self.inputs
            }
        )


def open_model(address: str, output: Path, columns: Mapping[str, str]) -> ServedModel:
    """Load a logged model. This runs the code that was logged with it.

    Args:
        address: see `_FORMS`.
        output: folder of the runs, whose registry is asked unless MLFLOW_TRACKING_URI names one.
        columns: the records' column by name of the model's input, where the two differ.

    Raises:
        BadInput: there is no such model, it cannot be loaded here, or it has no such input.
        TrackingError: the registry cannot be used.
    """
    place, trained = _located(address, output)
    mlflow = import_mlflow()
    try:
        loaded = mlflow.pyfunc.load_model(place)
    except (mlflow.exceptions.MlflowException, OSError) as error:
        raise BadInput(f"{address}: {str(error)[:500]}", remedy=f"give {_FORMS}") from error
    except ImportError as error:
        raise BadInput(
            f"{address} needs a package that is not installed here: {error.name or error}",
            remedy="install the packages of the model's requirements.txt",
        ) from error
    inputs = _inputs(address, loaded.metadata.signature, trained)
    if unknown := [name for name in columns if name not in {_shown(item) for item in inputs}]:
        raise BadInput(
            f"--column {unknown[0]}={columns[unknown[0]]}: {address} reads no {unknown[0]!r}",
            remedy=f"it reads {', '.join(map(_shown, inputs))[:500]}",
        )
    renamed = [
        Input(item.name, columns.get(_shown(item), item.column), item.kind, item.required)
        for item in inputs
    ]
    return ServedModel(place, renamed, trained, loaded)


def _shown(item: Input) -> str:
    return item.name or "text"


def _located(address: str, output: Path) -> tuple[str, RunConfig | None]:
    """Return where MLflow finds a model, and the configuration of the run that trained it."""
    folder = Path(address)
    name, at, alias = address.removeprefix("models:/").partition("@")
    if not at and not address.startswith("models:/"):
        if not (folder / "MLmodel").is_file():
            raise BadInput(f"{address}: no MLmodel file there", remedy=f"give {_FORMS}")
        return str(folder.absolute()), None
    asked = load("causal-lm", [("output", str(output.absolute()))])
    client = read_registry(asked, Workspace.of(asked))
    mlflow = import_mlflow()
    try:
        if at:
            version = client.get_model_version_by_alias(name, alias)
        else:
            version = client.get_model_version(*name.rsplit("/", 1))
    except (mlflow.exceptions.MlflowException, TypeError) as error:
        raise BadInput(
            f"{address}: the registry has no such model",
            remedy="name one that `steadytrain list` shows as registered, such as NAME@champion",
        ) from error
    return f"models:/{version.name}/{version.version}", _trained(mlflow, version.run_id)


def _trained(mlflow: Any, run_id: str | None) -> RunConfig | None:
    """Return the configuration that a run logged; None if it logged none that can be read."""
    if not run_id:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = mlflow.artifacts.download_artifacts(
                run_id=run_id, artifact_path="configuration", dst_path=scratch
            )
        except (mlflow.exceptions.MlflowException, OSError):
            return None
        files = sorted(Path(folder).glob("*.yaml"))
        try:
            return load(files[0]) if files else None
        except BadInput:
            # A newer or older version wrote it.
            return None


def _inputs(address: str, signature: Any, trained: RunConfig | None) -> list[Input]:
    """Return the columns of a signature. Texts have the names of the columns in training.

    Raises:
        BadInput: the model has no signature, or takes tensors.
    """
    schema = signature.inputs if signature else None
    if schema is None or schema.is_tensor_spec():
        raise BadInput(
            f"{address} does not say which columns it reads (its signature)",
            remedy="register a model that steadytrain has trained",
        )
    texts = {} if trained is None else {"text": trained.data.columns.text}
    if trained is not None and trained.data.columns.text_pair:
        texts["text_pair"] = trained.data.columns.text_pair
    if trained is not None and trained.data.columns.image:
        texts["image"] = trained.data.columns.image
    found = []
    for spec in schema.inputs:
        name, kind = spec.name or "", _kind(spec)
        column = texts.get(name or "text", name or "text")
        found.append(Input(name, column, kind, required=not name or spec.required))
    return found


def _kind(spec: Any) -> Kind:
    name = getattr(spec.type, "name", "")
    if name in _NUMBERS:
        return "number"
    return _OTHERS.get(name, "any")


def _items(result: Any) -> Sequence[Any]:
    if hasattr(result, "to_dict"):
        rows: list[Any] = result.to_dict("records" if result.ndim == 2 else "list")
        return rows
    return list(result)


def _plain_answer(item: Any) -> dict[str, Any]:
    """Return an answer by name. The scores of several labels are by label.

    Raises:
        ValueError: a number is not finite.
    """
    plain = _plain(item)
    if not isinstance(plain, dict):
        return {"prediction": plain}
    scored = [value for value in plain.values() if isinstance(value, dict)]
    if scored and all({"label", "score"} <= value.keys() for value in scored):
        return {value["label"]: value["score"] for value in scored}
    return {str(name): value for name, value in plain.items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the model predicts {value}")
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
