"""Open the lm-eval tasks of a configuration, with their data and without any network.

Tasks are opened before a run starts and again before it trains, so that problems do not appear only
after training.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.digest import file_digest, value_digest
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.foreign import foreign

# Run lm-eval's tasks from their first documents to their metrics, with made-up answers.
#
# Some needs of a task only show when it runs: more examples than exist, filters, metrics, Python
# code. Without a model, this takes a moment and wastes no training.

_DOCUMENTS: Final = 50
"""Documents per task. The others are read when the model answers."""


def rehearse(loaded: Mapping[str, Any]) -> None:
    """Run opened tasks without a model. Do not reuse them: they contain answers afterwards.

    Args:
        loaded: the tasks, as lm-eval's `evaluate` accepts them.

    Raises:
        BadInput: if a task cannot run.
    """
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate

    class Mute(LM):  # type: ignore[misc]
        """Treats everything as equally likely and writes nothing."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return [(-1.0, False)] * len(requests)

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return [-1.0] * len(requests)

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return [""] * len(requests)

    for name, task in loaded["tasks"].items():
        with running(name):
            evaluate(
                lm=Mute(),
                task_dict={"tasks": {name: task}, "groups": {}},
                limit=_DOCUMENTS,
                bootstrap_iters=0,
            )


def running(names: object) -> Any:
    """Turn errors that lm-eval raises while it runs tasks into BadInput."""
    return foreign(
        f"evaluation.tasks: {names} cannot be run by lm-eval",
        "fix the field or the document that the message names, or leave the task out",
    )


_EXTRA: Final = "pip install 'steadytrain[lm-eval]'"
_ADDRESS: Final = re.compile(r"(?!file:)[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_PLACE: Final = re.compile(" at 0x[0-9a-f]+")
"""Where an object is in memory, in its `repr`."""
_NEVER: Final = {
    "UNSAFE_CODE": "runs code that the model writes",
    "MULTIMODAL": "shows the model images or sound",
}
_FROM_ELSEWHERE: Final = ("custom_generate", "trust_remote_code", "assistant_model")
"""Settings of Transformers' `generate`."""


@dataclass(frozen=True)
class LmTasks:
    """Opened tasks.

    loaded: the tasks, as lm-eval's `evaluate` accepts them.
    digest: over their definitions and data.
    """

    loaded: Mapping[str, Any]
    digest: str

    def only(self, task: str) -> LmTasks:
        """Return one of the tasks, without its group."""
        return LmTasks({"tasks": {task: self.loaded["tasks"][task]}, "groups": {}}, self.digest)


def check_lm_tasks(config: RunConfig) -> None:
    """Reject tasks that cannot run, if this machine can check that.

    Raises:
        BadInput: the same as `open_lm_tasks`, or if a task cannot run.
    """
    # The light image, which prepares data, has neither package. The training image checks for
    # itself.
    if config.evaluation.tasks and (_installed("lm_eval") or _installed("torch")):
        rehearse(open_lm_tasks(config).loaded)


def open_lm_tasks(config: RunConfig) -> LmTasks:
    """Return the tasks in `evaluation.tasks`, set up as lm-eval would run them.

    Raises:
        BadInput: if lm-eval is not installed, a task does not exist or cannot be read, its data are
            not on this machine, or a floor of the gate is not for one of its metrics.
    """
    names = config.evaluation.tasks
    if not _installed("lm_eval"):
        raise BadInput(
            f"evaluation.tasks = {names}: lm-eval is not installed here",
            remedy=f"{_EXTRA}, or leave evaluation.tasks out",
        )
    # lm-eval's bootstrap would fork a process that has torch's threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    built = [_built(name, *_known(name)) for name in names]
    with foreign(f"evaluation.tasks = {names}: cannot be used together", "name each task once"):
        from lm_eval.tasks import TaskManager

        loaded = TaskManager(include_defaults=False).load(
            [item for part in built for item in (part if isinstance(part, list) else [part])]
        )
    for name, task in loaded["tasks"].items():
        for attribute, what in _NEVER.items():
            if getattr(task, attribute, False):
                raise BadInput(
                    f"evaluation.tasks: task {name!r} {what}, which steadytrain does not support",
                    remedy="leave it out",
                )
        _check_metrics(name, task)
        _check_generation(name, task.get_config("generation_kwargs"))
        # The same default as lm-eval's own command.
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    _check_gate(config, loaded)
    return LmTasks(loaded, _digest(loaded["tasks"]))


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def is_file(name: str) -> bool:
    """Return whether a task of evaluation.tasks is the path of a YAML file."""
    return name.endswith((".yaml", ".yml")) or os.sep in name


def _known(name: str) -> tuple[Any, str]:
    """Return the task manager that knows the task, and the task's name in it."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    if not is_file(name):
        manager = _all_tasks()
        if name not in manager.task_index:
            close = difflib.get_close_matches(name, manager.all_tasks, n=3)
            raise BadInput(
                f"evaluation.tasks = {name!r}: lm-eval has no task of that name",
                remedy=f"did you mean {' or '.join(close)}?"
                if close
                else "give a task's YAML file, or a name from `lm-eval ls tasks`",
            )
        return manager, name
    path = Path(name)
    if not path.is_file():
        raise BadInput(
            f"evaluation.tasks = {name!r}: there is no such file",
            remedy="give the path of a task's YAML file that this machine and the steps can read",
        )
    with _readable(name):
        group = load_yaml(path, resolve_func=False).get("group")
        if group is None:
            return TaskManager(include_defaults=False), name
        # A group names other tasks, next to it or installed.
        return TaskManager(include_path=str(path.parent)), str(group)


@functools.cache
def _all_tasks() -> Any:
    """Return the task manager of all installed tasks, which takes 7 s to read them."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _built(name: str, manager: Any, known_as: str) -> Any:
    """Return a task, a group, or the tasks of a tag."""
    with _offline(name), _readable(name):
        return manager._load_spec(known_as)


def _readable(name: str) -> contextlib.AbstractContextManager[None]:
    return foreign(
        f"evaluation.tasks = {name!r} cannot be opened",
        "check its fields and documents; its data must be on this machine: a dataset_path of json, "
        "csv or parquet with dataset_kwargs.data_files, or a folder",
    )


@contextlib.contextmanager
def _offline(name: str) -> Iterator[None]:
    """Within the block, data sets only come from this machine."""
    import datasets
    from huggingface_hub import constants

    places = [
        (datasets.config, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_DATASETS_OFFLINE"),
        (constants, "HF_HUB_OFFLINE"),
    ]
    before = [getattr(*attribute) for attribute in places]
    load = datasets.load_dataset

    def local(*args: Any, **given: Any) -> Any:
        for address in _addresses([args, given]):
            raise BadInput(
                f"evaluation.tasks = {name!r}: its data would be downloaded from {address}",
                remedy="download them, and give their path in the task's data_files",
            )
        if _names_a_format_alone(*args, **given):
            raise BadInput(
                f"evaluation.tasks = {name!r}: dataset_path is a format without data_files, "
                "which would read everything in the current folder",
                remedy="give the files' paths as dataset_kwargs.data_files",
            )
        return load(*args, **given)

    for attribute in places:
        setattr(*attribute, True)
    datasets.load_dataset = local
    try:
        yield
    finally:
        datasets.load_dataset = load
        for attribute, value in zip(places, before, strict=True):
            setattr(*attribute, value)


def _names_a_format_alone(path: Any = "", *_: Any, **given: Any) -> bool:
    """Return whether datasets would search for files by itself."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    placed = given.get("data_files") or given.get("data_dir")
    return path in _PACKAGED_DATASETS_MODULES and not placed


def _addresses(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        if _ADDRESS.match(content):
            yield content
    elif isinstance(content, Mapping):
        yield from _addresses(list(content.values()))
    elif isinstance(content, list | tuple):
        for item in content:
            yield from _addresses(item)


def score_name(task: str, metric: str, filtered: str) -> str:
    """Return TASK/METRIC, followed by the name of the filter for answers if there is one."""
    return f"{task}/{metric}" if filtered == "none" else f"{task}/{metric},{filtered}"


def _check_gate(config: RunConfig, loaded: Mapping[str, Any]) -> None:
    """Check that floors and the gate's metric belong to these tasks and can be used."""
    metrics = dict(_metrics(loaded["tasks"]))
    wanted = [("gate.floors", name) for name in config.gate.floors if "/" in name]
    if config.gate.task_metric:
        wanted.append(("gate.metric", config.gate.task_metric))
    for field, name in wanted:
        if field == "gate.floors" and name.rpartition("/")[0] in loaded.get("groups", {}):
            continue
        if name not in metrics:
            raise BadInput(
                f"{field} = {name!r}: no task of evaluation.tasks has that metric",
                remedy=f"one of {', '.join(metrics)}",
            )
        directed, averaged = metrics[name]
        if not directed or (field == "gate.metric" and not averaged):
            lacks = (
                "a mean over documents"
                if directed
                else "marked as better when higher or when lower"
            )
            raise BadInput(
                f"{field} = {name!r}: is not {lacks}",
                remedy="use another metric, such as acc or bits_per_byte, or set its "
                "higher_is_better and aggregation in the task's metric_list",
            )


def _check_generation(name: str, settings: Any) -> None:
    """Reject generation settings that load code or another model. Only the model may answer."""
    for setting in _FROM_ELSEWHERE:
        if isinstance(settings, Mapping) and setting in settings:
            raise BadInput(
                f"evaluation.tasks: task {name!r} has generation_kwargs.{setting}, which loads "
                "something other than the model",
                remedy=f"leave {setting} out",
            )


def _check_metrics(name: str, task: Any) -> None:
    """Check that lm-eval can aggregate each metric over the documents."""
    for metric, aggregate in task.aggregation().items():
        if not callable(aggregate):
            raise BadInput(
                f"evaluation.tasks: task {name!r} has a metric {metric!r} whose aggregation "
                "lm-eval does not know",
                remedy="set its aggregation in the task's metric_list, such as mean",
            )


def _metrics(tasks: Mapping[str, Any]) -> Iterator[tuple[str, tuple[bool, bool]]]:
    """Yield each metric's name, whether it has a direction, and whether it can compare models."""
    for task, opened in tasks.items():
        for metric, better in opened.higher_is_better().items():
            for item in opened._filters:
                yield (
                    score_name(task, metric, item.name),
                    (better is not None, averaged(opened, metric)),
                )


def averaged(task: Any, metric: str) -> bool:
    """Return whether a task's metric is a mean or weighted mean over documents."""
    if metric == "bits_per_byte":
        return True
    # For metrics that a task's own code adds, lm-eval uses the mean.
    aggregate = task.aggregation().get(metric)
    return aggregate is None or aggregate.__name__ == "mean"


def _digest(tasks: Mapping[str, Any]) -> str:
    """Return a digest of what determines the results. A data set's fingerprint covers its files."""
    from importlib.metadata import version

    def described(name: str) -> list[Any]:
        data = tasks[name].dataset
        sides = data.items() if isinstance(data, Mapping) else []
        prints = [[side, getattr(item, "_fingerprint", "")] for side, item in sides]
        return [name, _plain(tasks[name].config.to_dict(keep_callable=True)), prints]

    return value_digest([version("lm-eval"), *map(described, sorted(tasks))])


def _plain(value: Any) -> Any:
    """Return a task's setting as plain data that is the same in every process.

    A function is its name and the file that it comes from, with all that it calls there.
    """
    if isinstance(value, Mapping):
        return [[str(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    if callable(value):
        kind = value if hasattr(value, "__qualname__") else type(value)
        try:
            source = file_digest(Path(inspect.getfile(inspect.unwrap(kind))))
        except (TypeError, OSError):
            source = ""
        return [kind.__qualname__, source]
    return value if isinstance(value, str | int | float | None) else _PLACE.sub("", repr(value))
