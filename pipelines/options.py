"""Options and checks that several commands share, `--json`, and the configuration they describe."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import typer
from typer.core import TyperCommand

from steadytrain.components.shared.errors import BadInput, ConfigError, SteadytrainError
from steadytrain.components.sizing.batch import MOST_GPUS

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Command(TyperCommand):
    """A command that rejects an empty text, which its function would take for an option left out.

    `Path` would take it for the current folder.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        values, _, _ = self.make_parser(ctx).parse_args([*args])
        parameters: Sequence[Any] = self.params
        # The shell completes a line whatever its options are.
        for parameter in () if ctx.resilient_parsing else parameters:
            value = values.get(parameter.name)
            if value == "" or (isinstance(value, (list, tuple)) and "" in value):
                message = "is empty: give a value, or leave it out"
                raise typer.BadParameter(message, ctx, parameter)
        return super().parse_args(ctx, args)


class Commands(typer.Typer):
    """Commands that reject an empty text for any option or argument."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[_Function], _Function]:
        """Return a decorator that registers a command, as Typer's does."""
        return super().command(name, cls=_Command, **settings)


def runs(context: typer.Context, incomplete: str) -> list[str]:
    """Return names of runs in the output folder that start with the text typed so far."""
    from steadytrain.pipelines.runs import run_folders

    names = [path.name for path in run_folders(Path(context.params["output"]))]
    return [name for name in names if name.startswith(incomplete)]


def sources(incomplete: str) -> list[str]:
    """Return presets, YAML files and folders that start with the text typed so far."""
    from steadytrain.components.shared.config import preset_names

    folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    try:
        result = sorted(folder.iterdir())
    except OSError:
        result = []
    files = [f"{path}/" if path.is_dir() else str(path) for path in result]
    known = [name for name in files if name.endswith(("/", ".yaml", ".yml"))]
    return [name for name in [*preset_names(), *known] if name.startswith(incomplete)]


def overrides(incomplete: str) -> list[str]:
    """Return fields of the configuration, as FIELD=, that start with the text typed so far."""
    return [f"{name}=" for name in fields(incomplete)]


def fields(incomplete: str) -> list[str]:
    """Return fields of the configuration that start with the text typed so far."""
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.shared.config.fields import leaves

    return [item.name for item in leaves(RunConfig) if item.name.startswith(incomplete)]


DEFAULT_OUTPUT = Path("steadytrain-output")


def readable_folder(path: Path) -> Path:
    """Reject a path that is not a readable folder. A folder that does not exist yet is fine."""
    try:
        there = path.exists()
        why = "" if not there or path.is_dir() else "is not a folder"
        if there and not why and not os.access(path, os.R_OK | os.X_OK):
            why = "cannot be read: no permission"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    if why:
        raise BadInput(f"--output {str(path)!r} {why}", remedy="give the folder with the runs")
    return path


def keeps_source(source: str, write: Path | None) -> None:
    """Check that a completed configuration does not replace the one that it is made from.

    Raises:
        BadInput: it would.
    """
    if write is None:
        return
    same = False
    # A file that does not exist, or cannot, is not replaced.
    with contextlib.suppress(OSError, ValueError):
        same = (write / "steadytrain.yaml").samefile(source)
    if same:
        raise BadInput(
            f"--write {write}: steadytrain.yaml there is the configuration itself, which would be "
            "replaced",
            remedy="give another folder",
        )


def write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the texts of files into the folder of `--write`, and name what is written and removed.

    Raises:
        BadInput: as for `write_texts`.
    """
    from steadytrain.components.shared.storage.local import write_texts

    written, removed = write_texts(folder, texts, "--write")
    for path in removed:
        typer.echo(f"removed {path}, which an earlier --write wrote", err=True)
    for path in written:
        typer.echo(f"wrote {path}", err=True)


LEAST_GB: Final = 1e-9
LARGEST_GB: Final = 1e6
"""Memory or disk space that an option takes: a byte to a petabyte."""
MOST_CORES: Final = 8192
"""CPU cores of one machine that Linux can use."""


def at_most(largest: float) -> Callable[[float], float]:
    """Return a check that an option's number is at most `largest`. It also rejects NaN."""

    def check(value: float) -> float:
        if not value <= largest:
            raise typer.BadParameter(f"{value:g} is not a number up to {largest:,.0f}")
        return value

    return check


def amount(text: str, largest: float, least: float = 1) -> Any:
    """Return an option for a number whose default of 0 means that it is not given.

    A 0 that is given is rejected, and so is any number out of the range, and NaN.

    Args:
        text: its help.
    """

    def check(context: typer.Context, option: typer.CallbackParam, value: float) -> float:
        source = context.get_parameter_source(option.name or "")
        given = source is not None and source.name != "DEFAULT"
        if given and not least <= value <= largest:
            raise typer.BadParameter(f"{value:g} is not a number from {least:g} to {largest:,.0f}")
        return value

    return typer.Option(callback=check, show_default=False, help=text)


def gigabytes(text: str) -> Any:
    """Return an option for a number of GB, with the text as its help."""
    return amount(text, LARGEST_GB, LEAST_GB)


GpuCount = Annotated[
    int,
    amount(
        "One or several GPUs; above 8, in nodes of 8. It sets compute.nodes and "
        "compute.nproc_per_node. Default: those of the configuration; `init` asks on a terminal.",
        MOST_GPUS,
    ),
]
Prices = Annotated[
    Path | None,
    typer.Option(
        help="YAML file with your own prices, such as `H100: {usd_per_hour: 8, "
        "spot_usd_per_hour: 3}`; CPU is one core. It replaces all built-in prices."
    ),
]
Provider = Annotated[
    str,
    typer.Option(
        help="Provider whose list prices to use: aws, gcp, azure, lambda, runpod or modal. "
        "The plan says when they were checked. GPUs without a price there are not compared."
    ),
]
BudgetUsd = Annotated[
    float, amount("USD that training may cost. Default: compute.budget_usd.", 1e12, 1e-9)
]
TokensPerSecond = Annotated[
    float,
    amount(
        "Tokens per second that all devices together serve, for the price of inference per "
        "million tokens. Default: no such price.",
        1e9,
        1e-3,
    ),
]


def refuse_unread(given: Mapping[str, object], why: str, *, reads: Collection[str] = ()) -> None:
    """Reject options that were given and would not be read.

    Args:
        given: values by option; an empty one was not given.
        reads: options that are read.

    Raises:
        BadInput: there is one.
    """
    for name, value in given.items():
        if value and name not in reads:
            raise BadInput(f"{name}: {why}", remedy="leave it out")


YEAR = 366 * 24 * 3600.0
"""The longest wait, in seconds. The system's own limit is a few hundred years."""

Output = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        callback=readable_folder,
        help="The folder with the runs.",
    ),
]
Place = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="The folder with the runs, or its copy on S3: s3://BUCKET/PREFIX.",
    ),
]
RunName = Annotated[
    str,
    typer.Argument(help="A run's name, as `steadytrain list` shows it.", autocompletion=runs),
]
Source = Annotated[
    str,
    typer.Argument(help="A preset's name or the path of a YAML file.", autocompletion=sources),
]
DataSource = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A preset's name, the path of a YAML file, or data: a file, a folder, a glob, s3://, "
        "hub:NAME or package:NAME.",
        autocompletion=sources,
    ),
]
Run = Annotated[
    str | None,
    typer.Option("--run", help="Name of the run. The same name continues the same run."),
]
RunOutput = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", help="Folder for the runs, instead of the configuration's `output`."
    ),
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        autocompletion=overrides,
        help="Override a field, for example training.max_steps=100. Can be repeated.",
    ),
]
Pipeline = Annotated[
    Literal["finetune", "retrain", "tune", "cross-validate", "automl"],
    typer.Option(
        help="Pipeline to run. retrain checks for new data first, and ends early if there is "
        "none. tune searches for better settings, and trains the winner. cross-validate trains and "
        "scores on every fold, and registers nothing. automl finds the best model of some data."
    ),
]
Host = Annotated[
    str, typer.Option(help="Address of the Kubeflow server. Default: KF_PIPELINES_ENDPOINT.")
]
Namespace = Annotated[
    str,
    typer.Option(help="Namespace of your profile on a multi-user server. Default: KFP_NAMESPACE."),
]


def with_options(
    overrides: Sequence[str | tuple[str, Any]], **options: str | float | None
) -> list[str | tuple[str, Any]]:
    """Return the overrides of a configuration, with the options that stand for a field added.

    Args:
        options: by the field's name, such as run="mine". None and 0 mean that it was not given.
    """
    stated = ((field, value) for field, value in options.items() if value not in (None, 0))
    return [*overrides, *stated]


Extra = Literal["data", "serve", "train", "ui"]

_DATA: Final = ("mlflow", "numpy", "pyarrow", "tokenizers", "transformers", "zstandard")
_MODULES: Final = {
    "data": _DATA,
    "serve": ("fastapi", "prometheus_client", "uvicorn"),
    "train": (
        *_DATA,
        *("accelerate", "optuna", "peft", "safetensors", "scipy", "sklearn", "sqlalchemy", "torch"),
    ),
    "ui": ("starlette", "uvicorn"),
}
"""By extra, modules without which nothing of it works. Others, such as deepspeed, are only needed
for the settings that name them."""


def check_extra(extra: Extra, command: str) -> None:
    """Check that an extra is installed, without importing anything.

    Raises:
        BadInput: a package is missing. The fix is the command that installs the extra.
    """
    missing = [name for name in _MODULES[extra] if find_spec(name) is None]
    if missing:
        needs = ", ".join(missing)
        raise BadInput(
            f"{command} needs packages that are not installed here: {needs}",
            remedy=f"pip install 'steadytrain[{extra}]'",
        )


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A registered model, such as NAME@champion or models:/NAME/VERSION, or a folder "
        "with an MLmodel file.",
    ),
]
Columns = Annotated[
    list[str],
    typer.Option(
        "--column",
        metavar="INPUT=COLUMN",
        help="The data's column for an input of the model, such as text=body. Can be repeated.",
    ),
]


def columns_of(texts: Sequence[str]) -> dict[str, str]:
    """Return the data's column for each input of a model that `--column` names.

    Raises:
        BadInput: a text is not INPUT=COLUMN, or names an input again.
    """
    result = dict[str, str]()
    for text in texts:
        name, equals, column = text.partition("=")
        if not (name and equals and column):
            raise BadInput(f"--column {text}: it is not INPUT=COLUMN", remedy="such as text=body")
        if name in result:
            raise BadInput(
                f"--column {text}: {name} has the column {result[name]} already",
                remedy="give one column for each input",
            )
        result[name] = column
    return result


FLAG = "--json"
Json = Annotated[
    bool, typer.Option(FLAG, help="Print one JSON object instead of text, also for an error.")
]


def is_requested(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON. After `--`, nothing is an option."""
    return FLAG in takewhile(lambda argument: argument != "--", arguments)


_collected: list[str] | None = None
"""What `collected` gathers; None outside of it."""


def show(content: Mapping[str, Any]) -> None:
    """Print an object on standard output, or pass it to `collected`."""
    typer.echo(as_text(content)) if _collected is None else _collected.append(as_text(content))


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """Collect what the block shows. The caller prints one object when the command has ended."""
    global _collected
    _collected = []
    try:
        yield _collected
    finally:
        _collected = None


def as_text(content: Mapping[str, Any]) -> str:
    """Return an object as JSON."""
    return json.dumps(content, indent=2)


def of_error(error: SteadytrainError) -> dict[str, Any]:
    """Return the object that stands for an error: what is wrong, the fix, and the exit status."""
    result = failure(type(error).__name__, error.message, error.remedy, error.exit_code)
    if isinstance(error, ConfigError):
        names = ("field", "value", "message", "remedy")
        result["error"]["problems"] = [
            {name: getattr(problem, name) for name in names} for problem in error.problems
        ]
    return result


def failure(kind: str, message: str, remedy: str, exit_status: int) -> dict[str, Any]:
    """Return the object that stands for any failure."""
    result = {"type": kind, "message": message, "remedy": remedy, "exit_status": exit_status}
    return {"error": result}
