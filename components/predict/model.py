"""A logged model as batch prediction uses it: what it reads of a record, and its answers."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from steadytrain.components.series.encoder import covariate_of
from steadytrain.components.series.model import FORECASTS
from steadytrain.components.shared.config import RunConfig, load
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.tracking import import_mlflow, read_version
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.tabular.encoder import plain_value
from steadytrain.components.tabular.model import is_missing, plain_number
from steadytrain.components.tasks.encoding.fields import Defect, number_of, text_of, utf8_size
from steadytrain.components.tasks.served import NUMBER_COLUMNS, check_files

Kind = Literal["number", "text", "bytes", "any"]
_NUMBERS: Final = frozenset({"double", "float", "integer", "long"})
_OTHERS: Final[Mapping[str, Kind]] = {"string": "text", "binary": "bytes"}
_FORMS: Final = "NAME@ALIAS, models:/NAME/VERSION, or a folder with an MLmodel file"


@dataclass(frozen=True)
class Input:
    """A column that a model reads.

    name: as in the model's signature; "" if the model takes single texts.
    column: of the records.
    of: what it is a column of. In series, texts such as NA are names and 01 is a number; covariates
        are numbers or true and false. All as in training.
    """

    name: str
    column: str
    kind: Kind
    required: bool
    of: Literal["records", "series", "covariates"] = "records"

    def read(self, row: Mapping[str, Any]) -> Any:
        """Return a record's value, as the signature wants it; None if there is none.

        Raises:
            Defect: the value is of another kind, or required and missing.
        """
        if self.kind == "text" and self.required:
            return text_of(row, self.column)
        value = row.get(self.column)
        if self.kind == "bytes":
            if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
                # The library `datasets` stores images so.
                value = value["bytes"]
            if isinstance(value, bytes):
                return value
        value = plain_value(self.column, value)
        verbatim = self.of != "records" and self.kind == "any"
        if value in (None, "") if verbatim else is_missing(value):
            return self._missing()
        if self.kind == "bytes":
            raise Defect(
                "wrong_type", f"{self.column} is {str(value)[:80]!r}, not a file's content"
            )
        if self.kind == "any":
            return value
        if self.kind == "text":
            return str(value)
        return self._number(row, value)

    def _number(self, row: Mapping[str, Any], value: Any) -> float:
        if self.of != "records":
            read = covariate_of if self.of == "covariates" else number_of
            return read(row, self.column)
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
    identity: what MLflow calls this model alone, since a version may be registered again.
    trained: the configuration of its run, if the registry knows it.
    forecasts: whether the records are the history of series, and the answers their future.
    unseen: returns the number of values of records, by the model's name of the column, that are
        categories which training did not see; None if the model does not tell.
    filled: returns the number of times without a value that a forecast fills, by series; None if
        the model does not tell.
    """

    address: str
    inputs: Sequence[Input]
    trained: RunConfig | None
    loaded: Any
    forecasts: bool = False
    unseen: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, int]] | None = None
    filled: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, int]] | None = None
    identity: str = ""

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
        result = {item.name: item.read(row) for item in self.inputs}
        if all(value is None for value in result.values()):
            columns = ", ".join(item.column for item in self.inputs)
            raise Defect("missing_field", f"none of its columns has a value: {columns[:200]}")
        return result

    def checked(self, row: Mapping[str, Any], largest: int) -> Any:
        """Return what the model takes of a record of at most `largest` bytes.

        Raises:
            Defect: the model cannot take it, or it is too long.
        """
        value = self.value(row)
        length = _size(value)
        if length > largest:
            raise Defect(
                "too_long", f"{length:,} bytes, more than data.max_record_bytes = {largest:,}"
            )
        return value

    def without_column(self, seen: Collection[str], unread: Collection[str]) -> tuple[str, str]:
        """Return a column that no record has, and what is wrong; two "" if there is none.

        The model would take the column for missing in all of them.

        Args:
            seen: columns that a record has, of those that the model reads.
            unread: the records' other columns.
        """
        absent = [item.column for item in self.inputs if item.column not in seen]
        if not absent:
            return "", ""
        others = f"; the records also have {', '.join(sorted(unread))}"[:500] if unread else ""
        text = f"no record has the column {absent[0]!r}, and the model learned from it{others}"
        return absent[0], text

    def taken_for_missing(self, values: Sequence[Any]) -> Counter[str]:
        """Return the number of values, by the records' column, that the model takes for missing.

        They are absent or empty, or categories that training did not see. A single text is never
        missing. Neither is the value of a future time in the records of a forecast.

        Args:
            values: what `value` returned.
        """
        if self.single or self.forecasts:
            return Counter()
        unseen = self.unseen(values) if self.unseen else {}
        counts = Counter[str]()
        for item in self.inputs:
            empty = sum(value[item.name] is None for value in values)
            counts[item.column] += empty + unseen.get(item.name, 0)
        return +counts

    def filled_times(self, values: Sequence[Any]) -> Mapping[str, int]:
        """Return the number of times without a value that a forecast fills, by series.

        Args:
            values: all that `answers` has forecast from.
        """
        return self.filled(values) if self.forecasts and self.filled else {}

    def answer_each(self, values: Sequence[Any]) -> list[dict[str, Any] | Defect]:
        """Return for each value its prediction, or why there is none.

        If the model fails, each half is tried, down to the record that fails. So a batch that does
        not fit in memory is halved, too. A history is not, since half of it has other forecasts.
        """
        try:
            return list(self.answers(values))
        except Exception as error:
            if len(values) > 1 and not self.forecasts:
                half = len(values) // 2
                return self.answer_each(values[:half]) + self.answer_each(values[half:])
            return [Defect("not_predicted", str(error)[:500])]

    def answers(self, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the predictions for values, as plain data by name.

        Raises:
            Exception: whatever the model raises.
            ValueError: it has not one answer for each value, and does not forecast.
        """
        if self.single:
            result = self.loaded.predict(list(values))
        else:
            import pandas as pd

            result = self.loaded.predict(self._frame(pd, values))
        outcome = [_plain_answer(item) for item in _items(result)]
        if len(outcome) != len(values) and not self.forecasts:
            raise ValueError(f"the model gave {len(outcome)} answers for {len(values)} records")
        return outcome

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
        BadInput: there is no such model, it is damaged, it cannot be loaded here, or it has no such
            input.
        TrackingError: the registry cannot be used.
    """
    folder, trained = _located(address, output)
    mlflow = import_mlflow()
    try:
        files = mlflow.artifacts.download_artifacts(folder)
        check_files(Path(files), address)
        loaded = mlflow.pyfunc.load_model(files)
    except BadInput:
        raise
    except ImportError as error:
        raise BadInput(
            f"{address} needs a package that is not installed here: {error.name or error}",
            remedy="install the packages of the model's requirements.txt",
        ) from error
    except Exception as error:
        # What a damaged description or the model's own code raises can be anything.
        raise BadInput(
            f"{address} cannot be loaded: {type(error).__name__}: {str(error)[:500]}",
            remedy=f"give {_FORMS}; if its files are damaged, register it again",
        ) from error
    described = (loaded.metadata.metadata or {}).get(NUMBER_COLUMNS, "[]")
    inputs = _inputs(address, loaded.metadata.signature, trained, frozenset(json.loads(described)))
    if unknown := [name for name in columns if name not in {_shown(item) for item in inputs}]:
        raise BadInput(
            f"--column {unknown[0]}={columns[unknown[0]]}: {address} reads no {unknown[0]!r}",
            remedy=f"it reads {', '.join(map(_shown, inputs))[:500]}",
        )
    forecasts = FORECASTS in (loaded.metadata.metadata or {})
    model = getattr(_python_model(mlflow, loaded), "model", None)
    known = getattr(model, "covariates", ()) if forecasts else ()
    renamed = [
        replace(
            item,
            column=columns.get(_shown(item), item.column),
            of="covariates" if item.name in known else "series" if forecasts else "records",
        )
        for item in inputs
    ]
    # A model of an earlier version, or of a plugin, may have neither.
    unseen, filled = (getattr(model, name, None) for name in ("unseen", "filled"))
    identity = str(loaded.metadata.model_uuid)
    return ServedModel(folder, renamed, trained, loaded, forecasts, unseen, filled, identity)


def _python_model(mlflow: Any, loaded: Any) -> Any:
    """Return the object that answers; None if the model has another flavor."""
    try:
        return loaded.unwrap_python_model()
    except mlflow.exceptions.MlflowException:
        return None


def _shown(item: Input) -> str:
    return item.name or "text"


def _located(address: str, output: Path) -> tuple[str, RunConfig | None]:
    """Return where MLflow finds a model, and the configuration of the run that trained it."""
    folder = Path(address)
    if "@" not in address and not address.startswith("models:/"):
        # Path.is_file raises if an address is too long for a path.
        if not os.path.isfile(folder / "MLmodel"):  # noqa: PTH113
            raise BadInput(f"{address}: no MLmodel file there", remedy=f"give {_FORMS}")
        return str(folder.absolute()), None
    asked = load("causal-lm", [("output", str(output.absolute()))])
    _, version = read_version(asked, Workspace.of(asked), address)
    return f"models:/{version.name}/{version.version}", _trained(import_mlflow(), version.run_id)


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


def _inputs(
    address: str, signature: Any, trained: RunConfig | None, numbers: frozenset[str]
) -> list[Input]:
    """Return the columns of a signature. Those of models of texts or images alone, which name them
    `text`, `text_pair` and `image`, have the names of the columns in training.

    Args:
        numbers: the columns that hold numbers, whatever the signature says.

    Raises:
        BadInput: the model has no signature, or takes tensors.
    """
    schema = signature.inputs if signature else None
    if schema is None or schema.is_tensor_spec():
        raise BadInput(
            f"{address} does not say which columns it reads (its signature)",
            remedy="register a model that steadytrain has trained",
        )
    names = {spec.name or "" for spec in schema.inputs}
    texts = {}
    # Other models name the columns as the data do.
    if trained is not None and (names <= {"", "text", "text_pair"} or names == {"image"}):
        columns = trained.data.columns
        known = {"text": columns.text, "text_pair": columns.text_pair, "image": columns.image}
        texts = {name: column for name, column in known.items() if isinstance(column, str)}
    result = []
    for spec in schema.inputs:
        name = spec.name or ""
        kind: Kind = "number" if name in numbers else _kind(spec)
        column = texts.get(name or "text", name or "text")
        result.append(Input(name, column, kind, required=not name or spec.required))
    return result


def _kind(spec: Any) -> Kind:
    name = getattr(spec.type, "name", "")
    if name in _NUMBERS:
        return "number"
    return _OTHERS.get(name, "any")


def _size(value: Any) -> int:
    """Return the bytes of a text, of a file's content, or of values by column."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return len(value) if isinstance(value, bytes) else utf8_size(str(value))


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
