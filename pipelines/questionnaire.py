"""What `init` asks about hardware and goal, and what each answer changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import typer

from steadytrain.components.plan.plan import Plan
from steadytrain.components.plan.render import summary
from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.config.load import Override, override_items
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.shared.processes import host_memory
from steadytrain.components.shared.quantities import size
from steadytrain.components.sizing.batch import MOST_GPUS, nodes_for
from steadytrain.components.sizing.hardware import Gpu, all_gpus, device_name, kind_of, known_gpu
from steadytrain.pipelines.options import LARGEST_GB, LEAST_GB, MOST_CORES
from steadytrain.pipelines.plan_hardware import ANY, choose_hardware
from steadytrain.pipelines.planners import planned, planner_of

if TYPE_CHECKING:
    from steadytrain.components.plan.design import AnyPlan
    from steadytrain.components.plan.networks import NetworkPlan
    from steadytrain.components.plan.prepared_sample import KnownData
    from steadytrain.components.plan.series import SeriesPlan
    from steadytrain.components.plan.tables import TablePlan
    from steadytrain.pipelines.sources import Selection

_Answer = TypeVar("_Answer")
NONE: Final = "none"
"""The answer for this machine's own device."""
_GPU_OPTIONS: Final = ("--gpu-type", "--gpu-memory-gb", "--gpu-count")
_CPU_OPTIONS: Final = ("--cores", "--host-memory-gb")
_OPTIONS: Final = {
    "gpu": "--gpu-type",
    "memory_gb": "--gpu-memory-gb",
    "count": "--gpu-count",
    "goal": "--goal",
    "cores": "--cores",
    "host_memory_gb": "--host-memory-gb",
}
"""The option for each answer, in the order of the questions."""
_SHOWN: Final = ("model", "device", "batch", "memory", "matrix", "threads", "time", "cost")
"""Lines of a plan, by their first word, that an answer can change."""
_GOALS: Final = ("balanced", "fastest", "best")
_LEARNED: Final = ("model.adapter.", "training.bf16", "training.fp16", "training.optim")
"""Decisions for a GPU that a run does not make itself, as they affect what the model learns."""


@dataclass
class Answers:
    """What a user says about the machine to train on, and what for.

    gpu: a name of the table, `any`, `none` for this machine's device, or "" for no answer.
    count: of all GPUs; 0 for no answer. memory_gb: of each; 0 means the table's.
    cores: of the CPU; 0 for no answer. host_memory_gb: the RAM; 0 for no answer.
    """

    gpu: str = ""
    count: int = 0
    memory_gb: float = 0
    goal: str = ""
    cores: int = 0
    host_memory_gb: float = 0

    def __bool__(self) -> bool:
        return self != Answers()

    def answered(self) -> Iterator[tuple[str, str, Any]]:
        """Yield attribute, option and value of each answer, in the order of the questions."""
        for name, option in _OPTIONS.items():
            if value := getattr(self, name):
                yield name, option, value

    def kind(self) -> Gpu | None:
        """Return the kind of GPU; None if it is left open.

        Raises:
            BadInput: the table has no such GPU.
        """
        name = "" if self.gpu in (ANY, NONE) else self.gpu
        return kind_of(name, self.memory_gb) if name or self.memory_gb else None

    def settings(self) -> list[Override]:
        """Return what the answers set in the configuration.

        Raises:
            BadInput: they contradict each other.
        """
        if self.gpu == NONE and (self.count or self.memory_gb):
            raise BadInput(
                f"--gpu-type {NONE} with a number or memory of GPUs: there are no GPUs to count",
                remedy="name the GPU, or leave the others out",
            )
        result: list[Override] = []
        if self.count:
            nodes, per_node = nodes_for(self.count)
            result += [("compute.nodes", nodes), ("compute.nproc_per_node", per_node)]
        if self.count or self.memory_gb or self.gpu not in ("", NONE):
            result.append(("compute.device", "cuda"))
        if (kind := self.kind()) and kind.profile:
            result.append(("compute.pods.gpu_resource", kind.resource))
        if self.goal:
            result.append(("training.goal", self.goal))
        if self.cores:
            # Threads of a process, and cores of a pod.
            result.append(("compute.threads_per_rank", self.cores))
            result.append(("compute.pods.cpu", str(self.cores)))
        if self.host_memory_gb:
            result.append(("compute.pods.memory", f"{max(1, round(self.host_memory_gb * 1000))}M"))
        return result


@dataclass(frozen=True)
class Change:
    """What an answer changes.

    answer: the option that stands for it, with its value.
    fields: values before and after, by field of the configuration.
    before, after: the plan in a line, or why there is none.
    """

    answer: str
    fields: dict[str, tuple[Any, Any]]
    before: str
    after: str

    def lines(self) -> Iterator[str]:
        """Yield the change for people."""
        yield self.answer
        rows = [f"{name}: {old} -> {new}" for name, (old, new) in self.fields.items()]
        yield from (f"  file  {row}" for row in rows or ["unchanged"])
        yield f"  plan  {self.after}"
        if self.after == self.before:
            yield "        unchanged"
        elif self.before:
            yield f"  was   {self.before}"


@dataclass(frozen=True)
class _State:
    config: RunConfig
    reasons: dict[str, str] = field(default_factory=dict)
    plan: str = ""


class Questionnaire:
    """Turns answers into a configuration, and remembers what each of them changed.

    Data that it prepares for plans are there until its context ends.
    """

    def __init__(
        self, choose: Callable[[Sequence[Override]], Selection], given: Sequence[Override]
    ) -> None:
        """Begin without answers.

        Args:
            choose: returns the configuration with overrides.
            given: what the user sets otherwise, which no plan replaces.
        """
        self._choose = choose
        self._given = {name for name, _ in override_items(given)}
        self.changes: list[Change] = []
        self.selection = choose([])
        self._state = _State(self.selection.config)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def reasons(self) -> dict[str, str]:
        """Reasons for values, by field."""
        return self._state.reasons

    def take_each(self, answers: Answers) -> None:
        """Apply all answers, one after another, so that each shows what it changes.

        Raises:
            BadInput: they contradict each other or the configuration.
        """
        so_far, why = Answers(), unasked(self.selection.config)
        for _, option, _ in answers.answered():
            if option in why:
                raise BadInput(f"{option}: {why[option]}", remedy="leave it out")
        answers.settings()
        for name, option, value in answers.answered():
            setattr(so_far, name, value)
            shown = f"{value:g}" if isinstance(value, float) else value
            self.take(f"{option} {shown}", so_far)

    def take(self, answer: str, answers: Answers) -> Change:
        """Apply the answers so far, of which `answer` is the newest.

        Raises:
            BadInput: they contradict each other or the configuration.
        """
        before, asked = self._state, answers.settings()
        kind, decided = answers.kind(), dict[str, tuple[Any, str]]()
        self.selection = self._choose(asked)
        try:
            plan = self._plan(answers, kind)
            decided = dict(self._decided(plan))
            if "model.adapter.kind" in decided and "training.learning_rate" not in self._given:
                # The preset's rate is for its own method.
                asked = [*asked, ("training.learning_rate", None)]
                self.selection = self._choose(asked)
                plan = self._plan(answers, kind)
                decided = dict(self._decided(plan))
            text = (
                summary(plan) if isinstance(plan, Plan) else _outline(plan, answers.host_memory_gb)
            )
        except (BadInput, DataError) as error:
            decided, text = {}, f"none: {error}"
        values = [(name, value) for name, (value, _) in decided.items()]
        self.selection = self._choose([*asked, *values])
        reasons = {name: reason for name, (_, reason) in decided.items()}
        self._state = _State(self.selection.config, reasons, text)
        fields = _differing(before.config, self.selection.config)
        change = Change(answer, fields, before.plan, text)
        self.changes.append(change)
        return change

    def _plan(self, answers: Answers, kind: Gpu | None) -> AnyPlan:
        """Return the plan by formula for the hardware of the answers.

        Raises:
            BadInput, DataError: there is none, such as for data that are elsewhere.
        """
        config = self.selection.config
        own = answers.gpu == NONE or config.compute.device == "cpu"
        name = kind.name if kind else "" if own else ANY
        return planned(
            config,
            lambda: choose_hardware(config, name),
            command="steadytrain init",
            known=lambda: self._known,
        ).plan

    @cached_property
    def _known(self) -> KnownData:
        """What plans of images, mixed records and series know of the data; no answer changes it."""
        from steadytrain.components.plan.prepared_sample import known_data

        return self._open.enter_context(known_data(self.selection.config))

    def _decided(self, plan: AnyPlan) -> Iterator[tuple[str, tuple[Any, str]]]:
        """Yield the plan's values that a run would not find itself, by field, with the reason."""
        if not (isinstance(plan, Plan) and plan.job.machine.gpu.cuda and plan.works):
            return
        for one in plan.decisions:
            same = one.value == _value(plan.job.config, one.field)
            if one.field.startswith(_LEARNED) and not (one.yours or one.value is None or same):
                yield one.field, (one.value, f"for {plan.job.machine}: {one.reason}")


def unasked(config: RunConfig) -> dict[str, str]:
    """Return the options of questions that do not apply to a configuration, each with the reason.

    Those about GPUs and those about the CPU exclude each other.
    """
    task, framework = config.data.task, config.model.framework
    planner = planner_of(task)
    if planner == "table" or (planner == "series" and framework != "pytorch"):
        why = dict.fromkeys(_GPU_OPTIONS, f"{framework} learns {task} on the CPU, in one process")
    elif config.compute.device == "cpu":
        why = dict.fromkeys(_GPU_OPTIONS, "compute.device is cpu")
    else:
        why = dict.fromkeys(
            _CPU_OPTIONS, f"they are for models that learn on the CPU alone; {task} uses GPUs"
        )
    if planner != "texts":
        why["--goal"] = f"a plan for {task} chooses no methods"
    return why


def ask(questionnaire: Questionnaire) -> Answers:
    """Ask for hardware and goal on the terminal, and show what each answer changes.

    Questions that do not apply are named, with the reason.
    """
    answers, why = Answers(), unasked(questionnaire.selection.config)
    for reason in dict.fromkeys(why.values()):
        typer.echo(f"not asked: {', '.join(o for o in why if why[o] == reason)}, since {reason}")

    def fill(name: str, question: str, default: str, read: Callable[[str], Any]) -> None:
        """Prompt for a field of the answers until the configuration works with it."""

        def apply(text: str) -> None:
            before, value = getattr(answers, name), read(text)
            setattr(answers, name, value)
            shown = f"{value:g}" if isinstance(value, float) else value
            try:
                change = questionnaire.take(f"{_OPTIONS[name]} {shown}", answers)
            except BadInput:
                setattr(answers, name, before)
                raise
            typer.echo("\n".join(change.lines()))

        prompt_until_valid(question, default, apply)

    if "--gpu-type" in why:
        fill("cores", "CPU cores", str(len(os.sched_getaffinity(0))), _counted_cores)
        memory = f"{max(1, host_memory() // 10**9)}"
        fill("host_memory_gb", "GB of memory", memory, _memory_given)
    else:
        _ask_for_gpus(questionnaire, answers, fill)
    if "--goal" not in why:
        fill("goal", f"Goal ({', '.join(_GOALS)})", _GOALS[0], _goal)
    return answers


def _ask_for_gpus(
    questionnaire: Questionnaire,
    answers: Answers,
    fill: Callable[[str, str, str, Callable[[str], Any]], None],
) -> None:
    own = known_gpu(device_name(questionnaire.selection.config.compute))
    names = ", ".join(gpu.name for gpu in all_gpus())
    fill(
        "gpu",
        f"GPU to train on ({names}; {ANY} lets the plan choose; {NONE} is this machine's "
        f"{'GPU' if own else 'CPU'})",
        own.name if own else NONE,
        _known,
    )
    if answers.gpu == NONE:
        return
    if kind := answers.kind():
        fill(
            "memory_gb",
            f"GB of memory of each {kind.name}",
            f"{kind.memory_gb:g}",
            lambda text: kind_of(answers.gpu, float(text)).memory_gb,
        )
    question = f"One or several GPUs: how many (1 to 8, or nodes of 8 up to {MOST_GPUS})"
    fill("count", question, "1", _counted)


def prompt_until_valid(question: str, default: str, read: Callable[[str], _Answer]) -> _Answer:
    """Prompt on the terminal until the answer can be read; an empty one is the default.

    Args:
        read: raises BadInput, or ValueError for what is not a number.
    """
    while True:
        text = typer.prompt(question, default=default).strip()
        try:
            return read(text or default)
        except BadInput as error:
            typer.echo(f"  {error}", err=True)
        except ValueError:
            typer.echo(f"  {text!r} is not a number", err=True)


def _known(text: str) -> str:
    if text.lower() in (ANY, NONE):
        return text.lower()
    return kind_of(text).name


def _counted(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MOST_GPUS:
        raise BadInput(f"{count} GPUs", remedy=f"give a number from 1 to {MOST_GPUS}")
    nodes_for(count)
    return count


def _counted_cores(text: str) -> int:
    if not 1 <= (cores := int(text)) <= MOST_CORES:
        raise BadInput(f"{cores} cores", remedy=f"give a number from 1 to {MOST_CORES}")
    return cores


def _memory_given(text: str) -> float:
    if not LEAST_GB <= (memory := float(text)) <= LARGEST_GB:
        raise BadInput(
            f"{memory:g} is no memory in GB",
            remedy=f"give a number from {LEAST_GB:g} to {LARGEST_GB:g}",
        )
    return memory


def _goal(text: str) -> str:
    if text not in _GOALS:
        raise BadInput(f"goal {text!r}", remedy=f"one of {', '.join(_GOALS)}")
    return text


def _outline(plan: TablePlan | SeriesPlan | NetworkPlan, host_memory_gb: float) -> str:
    """Return a plan in a line, with whether the given memory is enough for it; 0 means none."""
    shown, first = list[str](), ""
    for line in plan.lines():
        first = line[:9].strip() or first
        if first in _SHOWN:
            shown.append(" ".join(line.split()))
    if host_memory_gb and plan.memory is not None:
        fits = plan.memory <= host_memory_gb * 1e9
        verdict = "fits" if fits else "DOES NOT FIT: the data alone take more"
        shown.append(f"{size(host_memory_gb * 1e9)} of memory: {verdict}")
    return "; ".join(shown)


def _value(config: RunConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _differing(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ, with both values."""
    pairs = (_flat(one.model_dump(mode="json")) for one in (before, after))
    old, new = map(dict, pairs)
    return {
        name: (old.get(name), new.get(name))
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    }


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
