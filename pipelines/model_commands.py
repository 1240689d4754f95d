"""Commands about data and models: lineage, extract, predict, serve, show-data."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.left_out import counted, detections
from steadytrain.pipelines import options
from steadytrain.pipelines.options import (
    DEFAULT_OUTPUT,
    DataSource,
    Json,
    Output,
    Overrides,
    Run,
    RunOutput,
    check_extra,
    with_options,
)

if TYPE_CHECKING:
    from steadytrain.components.predict.batch import Summary
    from steadytrain.components.predict.model import ServedModel
    from steadytrain.components.preprocess.data_card import Document
    from steadytrain.components.shared.config.data import DataConfig


def lineage(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODEL@ALIAS | FINGERPRINT",
            help="A registered model, such as NAME@champion, or a fingerprint of prepared data.",
        ),
    ],
    output: Output = DEFAULT_OUTPUT,
    as_json: Json = False,
) -> None:
    """Show what a model was made from, or every model that was trained on some data.

    It asks the MLflow store of the output folder, or of MLFLOW_TRACKING_URI.
    """
    from steadytrain.components.register.lineage import LineageStore

    store = LineageStore(output)
    name, at, alias = subject.rpartition("@")
    if at:
        model = store.of_model(name, alias)
        if as_json:
            options.show(model.as_data())
            return
        typer.echo(f"version {model.version} of {model.model}")
        facts = {
            **model.made_from,
            **model.origin,
            "sources": ", ".join(model.sources),
            "environment": _listed(model.environment),
            "plan": _listed(model.plan),
            "mlflow run": model.mlflow_run,
            "attempts": str(model.attempts),
            "checkpoints": ", ".join(model.checkpoints),
        }
        for what, value in facts.items():
            if value:
                typer.echo(f"  {what.replace('_', ' ')}: {value}")
        return
    models = store.trained_on(subject)
    if as_json:
        options.show({"data": subject, "models": [item.as_data() for item in models]})
        return
    for item in models:
        names = f" ({', '.join(item.aliases)})" if item.aliases else ""
        run = item.made_from.get("run", "unknown")
        typer.echo(f"version {item.version} of {item.model}{names}, run {run}")


def _listed(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def extract(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The exported model of a multi_task run: a folder, models:/NAME@ALIAS, or another "
            "address as in model.base.",
        ),
    ],
    part: Annotated[str, typer.Argument(help="The name of the part, as in data.parts.")],
    folder: Annotated[Path, typer.Argument(help="The new folder to write the classifier to.")],
    output: Output = DEFAULT_OUTPUT,
    as_json: Json = False,
) -> None:
    """Write the classifier of one of several data sets as a model of its own.

    Transformers loads the folder with AutoModelForSequenceClassification. It works as a model.base,
    too.
    """
    check_extra("train", "steadytrain extract")
    from steadytrain.components.shared.config import from_mapping
    from steadytrain.components.shared.model_source import resolve_model
    from steadytrain.components.tasks.multi_task import extract_part

    content = {"name": "extract", "data": {"source": ["unused"]}, "model": {"base": model}}
    config = from_mapping({**content, "output": str(output.absolute())})
    labels = extract_part(resolve_model(model, config), part, folder)
    if as_json:
        options.show({"folder": str(folder), "part": part, "labels": labels})
    else:
        typer.echo(f"{folder}: classifier of {part} with {', '.join(labels)}")


def check(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT | MODEL",
            help="A checkpoint, such as output/runs/RUN/checkpoints/step-00000100 or its s3:// "
            "address; or a model: a run's folder model, NAME@ALIAS, or another address as in "
            "model.base.",
        ),
    ],
    output: Output = DEFAULT_OUTPUT,
    as_json: Json = False,
) -> None:
    """Check that a checkpoint or a model is whole, and gives the loss that its run recorded.

    It compares sizes and digests with what was written, finds tensors that are incomplete, NaN or
    infinite, and loads the weights into a new model. In the folder of a run, a checkpoint must give
    the validation loss of its step, and the exported model the test loss of the evaluation. It
    lists what could not be checked, and changes nothing. The exit status is 1 if something is
    wrong; each line names the file or the tensor.

    For example: `steadytrain check output/runs/my-run/model`
    """
    check_extra("train", "steadytrain check")
    from steadytrain.components.evaluate.soundness import check as check_soundness
    from steadytrain.components.shared.config import from_mapping
    from steadytrain.components.shared.model_source import resolve_model
    from steadytrain.components.shared.stage import quiet
    from steadytrain.components.train.checkpoint.checkpoint import is_of_a_step

    quiet()
    if not is_of_a_step(subject.rstrip("/").rpartition("/")[2]):
        if "@" in subject and ":" not in subject and not os.path.lexists(subject):
            subject = f"models:/{subject}"
        content = {"name": "check", "data": {"source": ["unused"]}, "model": {"base": subject}}
        config = from_mapping({**content, "output": str(output.absolute())})
        subject = str(resolve_model(subject, config))
    soundness = check_soundness(subject)
    if as_json:
        options.show({**asdict(soundness), "sound": not soundness.problems})
    else:
        for sign, lines in (
            ("ok     ", soundness.passed),
            ("skipped", soundness.skipped),
            ("BAD    ", soundness.problems),
        ):
            for line in lines:
                typer.echo(f"{sign}  {line}")
    if soundness.problems:
        raise typer.Exit(1)


def predict(
    model: options.Model,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA...", help="Files, folders, globs, s3:// or hub: addresses of records."
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            help="The file or s3:// address to write: .jsonl, .csv or .parquet. Without it, "
            "predictions are printed as JSON lines."
        ),
    ] = None,
    columns: options.Columns = [],  # noqa: B006  typer copies it
    with_inputs: Annotated[
        bool, typer.Option("--with-inputs", help="Write what the model read of a record, too.")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Records per call of the model, which is halved if one fails. Default: 256; a "
            "forecast reads all records at once.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show what the model reads, and predict for three records only, or forecast "
            "from all of them. Nothing is written.",
        ),
    ] = False,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    output: Output = DEFAULT_OUTPUT,
    as_json: Json = False,
) -> None:
    """Predict for all records of a file, with any model that is registered.

    It reads data as training does, one batch after the other. Each prediction comes with the source
    and line of its record. A record that the model cannot take goes to OUT.quarantine.jsonl with
    the reason; more of these than data.max_bad_share are an error. The file appears under its name
    only when it is complete; after a kill, the same command continues. A model of series takes all
    records as the history, and forecasts the times after the last one of each series.

    The model's own code runs, as MLflow has it, so name only models that you trust. --set takes
    data.format, data.csv, data.max_bad_share and data.max_record_bytes.

    For example: `steadytrain predict adult-income@champion new.csv --out scores.parquet`
    """
    check_extra("data", "steadytrain predict")
    from steadytrain.components.predict.batch import predict as predict_batches
    from steadytrain.components.predict.destination import check_destination, local_file
    from steadytrain.components.predict.model import open_model
    from steadytrain.components.predict.progress import Progress
    from steadytrain.components.shared.stage import quiet

    quiet()
    if out is not None:
        check_destination(out, overwrite=overwrite)
    renamed = options.columns_of(columns)
    loaded = open_model(model, output, renamed)
    if with_inputs and loaded.reads_files:
        raise BadInput(
            f"--with-inputs: {model} reads whole files, which no row holds", remedy="leave it out"
        )
    if with_inputs and loaded.forecasts:
        raise BadInput(
            f"--with-inputs: {model} forecasts times that no record has", remedy="leave it out"
        )
    if batch_size is not None and loaded.forecasts:
        raise BadInput(
            f"--batch-size {batch_size}: {model} forecasts from all records at once",
            remedy="leave it out",
        )
    data = _data_to_read(sources, loaded, overrides)

    def show(state: Progress) -> None:
        share = f", {state.share:.0%} of the data" if state.share else ""
        typer.echo(f"predict: {state.predicted:,} of {state.records:,} records{share}", err=True)

    kept = None if dry_run else out
    with contextlib.nullcontext() if kept is None else local_file(kept) as path:
        summary = predict_batches(
            loaded,
            data,
            path,
            batch_size=batch_size or _BATCH,
            with_inputs=with_inputs,
            limit=3 if dry_run and not loaded.forecasts else None,
            address=kept or "",
            show=show,
        )
    facts = {
        "model": loaded.address,
        "inputs": {item.name or "text": item.column for item in loaded.inputs},
        "out": kept,
        **asdict(summary),
    }
    if as_json:
        options.show(facts)
        return
    if dry_run:
        read = ", ".join(f"{item.column} ({item.kind})" for item in loaded.inputs)
        typer.echo(f"{loaded.address} reads {read}", err=True)
    typer.echo(_done(summary, loaded), err=True)
    _show_counts(summary)


def _show_counts(summary: Summary) -> None:
    """Name what was refused, taken for missing, filled or not read."""
    if summary.warning:
        typer.echo(f"warning: {summary.warning}", err=True)
    if summary.missing:
        counts = (f"{column} {count:,}" for column, count in summary.missing.items())
        typer.echo(
            "records whose value is absent, empty or a category that training did not see, and "
            f"counts as missing: {', '.join(counts)}",
            err=True,
        )
    if summary.filled:
        times, count = sum(summary.filled.values()), len(summary.filled)
        typer.echo(
            f"times without a value that the forecast fills on a line between their neighbors: "
            f"{times:,} in {count:,} series",
            err=True,
        )
    for remark in detections(summary.detected):
        typer.echo(remark, err=True)
    if summary.left_out:
        files = counted(summary.left_out, summary.left_out)
        typer.echo(f"not read: {', '.join(files)}", err=True)
    if summary.unread:
        typer.echo(f"columns that the model does not read: {', '.join(summary.unread)}", err=True)


def _done(summary: Summary, loaded: ServedModel) -> str:
    rate = (summary.records - summary.continued) / max(summary.seconds, 1e-9)
    done = f"predicted {summary.predicted:,} of {summary.records:,} records"
    if summary.continued:
        done += f", {summary.continued:,} of them before the command was killed,"
    if loaded.forecasts:
        done = f"forecast {summary.predicted:,} times from {summary.records:,} records"
    return f"{done} with {loaded.address} ({rate:,.0f} per second)"


_BATCH: Final = 256
"""Records for which a model predicts together."""
_READ: Final = ("data.format", "data.csv", "data.max_bad_share", "data.max_record_bytes")


def _data_to_read(
    sources: Sequence[str], model: ServedModel, overrides: Sequence[str]
) -> DataConfig:
    """Return how to read records: as in training, unless overridden."""
    from steadytrain.components.shared.config.data_sections import SUFFIXES
    from steadytrain.components.shared.config.load import load, override_items

    for field, value in override_items(overrides):
        if not field.startswith(_READ):
            raise BadInput(
                f"--set {field}={value}: predict does not read {field}",
                remedy=f"it reads {', '.join(_READ)}",
            )
    trained = model.trained.data if model.trained else None
    settings: dict[str, Any] = {
        "data.source": list(sources),
        "data.format": "auto",
        "data.exclude": [],
    }
    if trained is not None:
        settings["data.max_bad_share"] = trained.max_bad_share
        settings["data.max_record_bytes"] = trained.max_record_bytes
        settings |= {f"data.csv.{name}": value for name, value in trained.csv}
    images = [item.column for item in model.inputs if item.kind == "bytes"]
    suffixes = {suffix for source in sources for suffix in PurePosixPath(source.lower()).suffixes}
    is_table = len(model.inputs) > 1 or images != ["image"] or suffixes & SUFFIXES.keys()
    if len(images) > 1 or (images and is_table):
        # A table that names the files, relative to its folder.
        settings["data.columns.image"] = images if len(images) > 1 else images[0]
    preset = "multimodal" if len(images) > 1 else "images" if images else "causal-lm"
    return load(preset, [*settings.items(), *overrides]).data


def show_data(
    source: DataSource,
    n: Annotated[int, typer.Option("--n", min=1, max=200, help="Number of records.")] = 5,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run: Run = None,
    output: RunOutput = None,
    as_json: Json = False,
) -> None:
    """Show the first records as the model would see them, before any training.

    Each record is encoded with the run's settings and tokenizer, and decoded again. What the model
    learns to write is green on a terminal, and in [[double brackets]] elsewhere; the rest is only
    context. A record of a table is shown with its label. A record that cannot be used has the
    reason instead. Use it to check that the answers, and nothing else, are learned, and that the
    chat template prints what you expect.

    It writes nothing. A tokenizer that the run would train on all data is trained on these records.

    For example: `steadytrain show-data chats.jsonl --n 3 --set model.base=hub:NAME`
    """
    from steadytrain.components.preprocess.data_card import show
    from steadytrain.components.shared.redaction import on_one_line, printable
    from steadytrain.pipelines.sources import open_source

    chosen = open_source(source, with_options(overrides, run=run, output=output))
    preview = show(chosen.config, n)
    if as_json:
        options.show({"records": [asdict(record) for record in preview]})
        return
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for record in preview:
        line = on_one_line(printable(f"line {record.line} of {record.source}"))
        if record.problem:
            typer.echo(f"--- {line}: not used, {on_one_line(printable(record.problem))}\n")
            continue
        label = "" if record.label is None else f", label {on_one_line(printable(record.label))}"
        for number, row in enumerate(record.rows, 1):
            part = f", row {number} of {len(record.rows)}" if record.rows[1:] else ""
            cut = ", cut" if record.cut else ""
            unused = f"; {printable(record.unused)}" if record.unused else ""
            # Records of a table are no tokens.
            count = f"{record.tokens:,} tokens" if record.tokens else "a record"
            typer.echo(f"--- {line}: {count}{cut}{part}{label}{unused}")
            for document in row:
                name = f"{document.name}, " if document.name else ""
                targets = f", {document.targets:,} targets" if record.marked else ""
                if record.tokens:
                    typer.echo(f"({name}{document.tokens:,} tokens{targets})")
                typer.echo(f"{_marked(document, color=color)}\n")


def _marked(document: Document, *, color: bool) -> str:
    from steadytrain.components.shared.redaction import printable

    texts = [(printable(piece.text), piece.target) for piece in document.pieces]
    if color:
        green = typer.colors.GREEN
        return "".join(typer.style(text, fg=green) if target else text for text, target in texts)
    return "".join(f"[[{text}]]" if target else text for text, target in texts)


def serve(
    model: options.Model,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Any other than this machine's own needs a token in "
            "STEADYTRAIN_SERVE_TOKEN."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")
    ] = 8485,
    columns: options.Columns = [],  # noqa: B006  typer copies it
    batch_size: Annotated[
        int, typer.Option(min=1, help="Records per call of the model, from waiting requests.")
    ] = 64,
    max_rows: Annotated[int, typer.Option(min=1, help="Most records of a request.")] = 256,
    max_bytes: Annotated[int, typer.Option(min=1, help="Most bytes of a request.")] = 1_000_000,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=86400, help="Most seconds for a request.")
    ] = 30.0,
    cors_origin: Annotated[
        list[str],
        typer.Option(
            metavar="ORIGIN",
            help="A web front end that may call it from a browser, such as "
            "https://app.example.com. Can be repeated.",
        ),
    ] = [],  # noqa: B006  typer copies it
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Serve a registered model by HTTP, with the checks and answers of `steadytrain predict`.

    POST /predict takes {"records": [{"COLUMN": VALUE, ...}, ...]} and answers with a prediction for
    each, or with the reason for each record that has none. GET /schema shows the columns, from the
    model's signature, and the limits; /health, /ready and /metrics are for probes and Prometheus.
    Requests that wait are predicted together. SIGTERM ends it after the requests that have arrived.

    The model's own code runs, as MLflow has it, so name only models that you trust.

    For example: `steadytrain serve adult-income@champion --port 8485`
    """
    check_extra("data", "steadytrain serve")
    check_extra("serve", "steadytrain serve")
    from steadytrain.components.predict import service
    from steadytrain.components.predict.model import open_model
    from steadytrain.components.shared import web_server
    from steadytrain.components.shared.config.data import DataConfig
    from steadytrain.components.shared.stage import quiet
    from steadytrain.components.shared.stopping import stoppable

    token = os.environ.get(service.TOKEN_VARIABLE, "")
    web_server.check_token(host, token, service.TOKEN_VARIABLE)
    for origin in cors_origin:
        service.check_origin(origin)
    renamed = options.columns_of(columns)
    quiet()
    # Before the model is loaded, which may take minutes.
    listener = web_server.listen(host, port)
    with stoppable() as stopping:
        loaded = open_model(model, output, renamed)
        # A library that catches everything, such as an import of an optional package, loses the
        # exception of a signal.
        stopping.check()
    largest: int = DataConfig.model_fields["max_record_bytes"].default
    limits = service.Limits(
        rows=max_rows,
        bytes=max_bytes,
        record_bytes=loaded.trained.data.max_record_bytes if loaded.trained else largest,
        seconds=timeout,
        batch_size=batch_size,
    )
    app = service.application(
        loaded,
        limits,
        hosts=web_server.accepted_hosts(host),
        token=token,
        origins=cors_origin,
    )
    typer.echo(f"{web_server.address_of(listener, host)} serves {loaded.address}; Ctrl-C ends it")
    service.serve(app, listener, limits)
