"""Check a configuration before anything starts: its addresses, its plugins, and unwise settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from pkgutil import resolve_name
from typing import Final

from steadytrain.components.preprocess.sources import check_source
from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.data_fields import is_template
from steadytrain.components.shared.config.model import ENSEMBLE
from steadytrain.components.shared.config.strategies import DISK
from steadytrain.components.shared.effects import is_local
from steadytrain.components.shared.errors import BadInput, ConfigError, Problem
from steadytrain.components.shared.feature_address import FeatureAddress, is_feature_address
from steadytrain.components.shared.lm_tasks import is_file
from steadytrain.components.shared.model_source import resolve_model
from steadytrain.components.shared.paths import local_path
from steadytrain.components.shared.toolchain import (
    DISK_REMEDY,
    REMEDY,
    missing_for_disk,
    missing_tools,
)
from steadytrain.components.shared.tracking.pull_sink import check_package
from steadytrain.pipelines.pod_names import MOUNT_PATH

_PACKAGE: Final = "package:"


def check_here(config: RunConfig) -> list[str]:
    """Check that the local files and the packages that a run reads are on this machine.

    Other addresses are not opened. What lies on a cluster's volume is not checked where the volume
    is not mounted, and packages are not on a machine without torch, which trains nothing.

    Returns:
        A remark for each address that was not checked for one of these reasons.

    Raises:
        ConfigError: with every address that has nothing.
    """
    problems, remarks = list[Problem](), list[str]()
    trains = importlib.util.find_spec("torch") is not None
    for field, address in inputs(config):
        if is_away(address):
            remarks.append(f"{field} = {address} is not checked: {MOUNT_PATH} is not mounted here")
            continue
        if not is_local(address) and not address.startswith(_PACKAGE):
            continue
        try:
            _check(field, address, config)
        except BadInput as error:
            if address.startswith(_PACKAGE) and not trains:
                remarks.append(f"{field}: {error.message}; where the run trains, it must be")
            else:
                message = error.message.removeprefix(f"{field} = {address!r}: ")
                problems.append(Problem(field, repr(address), message, error.remedy))
    if problems:
        raise ConfigError(problems)
    return remarks


def is_away(address: str) -> bool:
    """Return whether an address is on a cluster's volume, which is not mounted here."""
    on_volume = is_local(address) and _is_below(address, MOUNT_PATH)
    return on_volume and not Path(MOUNT_PATH).is_dir()


def check_submitted(config: RunConfig) -> None:
    """Check that pods can reach the local addresses of a configuration.

    Raises:
        ConfigError: with every address of a file or folder that is not on the shared volume.
    """
    problems = [
        Problem(
            field,
            repr(address),
            "is a path on this machine, which pods do not share",
            f"copy it to the shared volume, and name it there ({MOUNT_PATH}/...), or use an s3:// "
            "address" + (" or hub:NAME" if read else ""),
        )
        for read, addresses in ((True, inputs(config)), (False, _outputs(config)))
        for field, address in addresses
        if is_local(address)
        and not any(_is_below(address, mounted) for mounted in (MOUNT_PATH, config.output))
    ]
    if problems:
        raise ConfigError(problems)


def _check(field: str, address: str, config: RunConfig) -> None:
    if field in ("data.chat_template", "evaluation.tasks"):
        if not local_path(address).is_file():
            raise BadInput("no such file", remedy="give the path of a file that exists")
    elif field.startswith("data."):
        check_source(address)
    else:
        resolve_model(address, config)


def inputs(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield what a run reads: the field and the address."""
    training = config.training
    for field, address in config.data.addresses:
        if is_feature_address(address):
            table = FeatureAddress.parse(address)
            yield from ((field, table.folder), (field, table.entities))
        else:
            yield field, address
    for field, addresses in (
        ("model.base", config.model.base),
        ("model.tokenizer", config.model.tokenizer),
        ("training.distillation.teacher", training.distillation.teacher),
        ("training.curriculum.model", training.curriculum.model),
    ):
        if addresses:
            yield field, addresses
    template = config.data.chat_template
    if template and not is_template(template):
        yield "data.chat_template", template
    for task in config.evaluation.tasks:
        if is_file(task):
            yield "evaluation.tasks", task


def _outputs(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield what the steps share besides `output`: the field and the address."""
    for field, addresses in (
        ("recovery.checkpoints", config.recovery.checkpoints),
        ("registry.lock", config.registry.lock),
        ("tune.log", config.tune.log),
    ):
        if addresses:
            yield field, addresses


def _is_below(address: str, folder: str) -> bool:
    path = PurePosixPath(address)
    return path.is_relative_to(folder) and ".." not in path.parts


_LOADERS: Final = {
    plugins.TASKS: "steadytrain.components.tasks.base:load_task",
    plugins.TRAINERS: "steadytrain.components.train.step:load_trainer",
    plugins.ORDERS: "steadytrain.components.train.loop.order:load_order",
    plugins.SINKS: "steadytrain.components.train.step:load_sink",
    plugins.METRICS: "steadytrain.components.evaluate.metric:load_metric",
}
"""What loads and checks a plugin, by group. These modules are slow, and imported only if another
package adds something there."""


def check_plugins(config: RunConfig) -> None:
    """Reject a run whose plugins cannot be used.

    The configuration itself has imported the specs that it needs: schedules, optimizers,
    strategies and training components. Metrics are checked whether the configuration names them or
    not, because evaluation computes all of them.

    On a machine without torch, which submits runs but trains none, this does nothing: plugins may
    need what only the images have.

    Raises:
        ConfigError: with every plugin that cannot be imported, or is not what its group needs; or
            with every setting that the task does not support.
        BadInput: the members of an ensemble are not those of one.
    """
    if importlib.util.find_spec("torch") is None:
        return
    problems: list[Problem] = []
    for field, group, name in _used(config):
        options = [config.training.order_options] if group == plugins.ORDERS else []
        try:
            resolve_name(_LOADERS[group])(name, *options)
        except BadInput as error:
            problems.append(Problem(field, repr(name), error.message, error.remedy))
    for name in config.sinks:
        try:
            check_package(name)
        except BadInput as error:
            problems.append(Problem("tracking.sinks", repr(name), error.message, error.remedy))
    if problems:
        raise ConfigError(problems)
    # Imported late, with pyarrow.
    from steadytrain.components.tasks.checks import check_task

    check_task(config)
    if config.model.framework == ENSEMBLE:
        # Imported late, with NumPy.
        from steadytrain.components.train.framework.ensemble import members_of

        for member in members_of(config):
            member.of(config)


def _used(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the plugins of other packages: the field, the group and the name."""
    named = [
        ("data.task", plugins.TASKS, [config.data.task]),
        ("model.framework", plugins.TRAINERS, [config.model.framework]),
        ("training.order", plugins.ORDERS, [config.training.order]),
        ("tracking.sinks", plugins.SINKS, config.tracking.sinks),
        ("evaluation", plugins.METRICS, plugins.names(plugins.METRICS)),
    ]
    for field, group, names in named:
        foreign = plugins.others(group)
        yield from ((field, group, name) for name in names if name in foreign or ":" in name)


def check_tools(config: RunConfig) -> None:
    """Check that this machine, if the run trains on it, can offload to its disk.

    Raises:
        ConfigError: with what is missing.
    """
    if problem := _disk_problem(config):
        raise ConfigError([problem])


def _disk_problem(config: RunConfig) -> Problem | None:
    if config.compute.offload == DISK and _trains_here(config) and (missing := missing_for_disk()):
        message = f"this machine lacks {', '.join(missing)}, and DeepSpeed compiles what it needs"
        return Problem("compute.offload", repr(DISK), message, DISK_REMEDY)
    return None


def _trains_here(config: RunConfig) -> bool:
    return config.compute.launcher not in ("trainjob", "pytorchjob")


def here(config: RunConfig) -> Iterator[str]:
    """Yield what this machine lacks for the kernels that the run would compile here."""
    if config.training.torch_compile and _trains_here(config) and (missing := missing_tools()):
        yield (
            f"training.torch_compile: this machine lacks {', '.join(missing)}; if the run trains "
            f"here, it continues without compiling. To compile, {REMEDY}"
        )
    if problem := _disk_problem(config):
        yield f"if the run trains here, it is refused: {problem}"


def anywhere(config: RunConfig) -> Iterator[str]:
    """Yield which settings cannot act, as far as the configuration alone shows it."""
    from steadytrain.components.sizing.length import without_effect

    training = config.training
    if training.max_steps > 0:
        yield from without_effect(training, None, training.max_steps)
    most, needed = config.evaluation.max_examples, config.gate.min_units
    if most is not None and most < needed:
        yield (
            f"evaluation.max_examples = {most}: fewer than gate.min_units = {needed}, so the gate "
            "can never decide, and promotes nothing; raise evaluation.max_examples, or lower "
            "gate.min_units"
        )


def on_cluster(config: RunConfig) -> Iterator[str]:
    """Yield what the pods of the steps reserve too little for."""
    if config.compute.launcher == "process" and "train" not in config.pipeline.resources:
        yield (
            "compute.launcher = process: training runs in the pod of the train step, which "
            "reserves only what a supervisor needs; set pipeline.resources, such as "
            "train: {cpu: '4', memory: 16Gi}"
        )
