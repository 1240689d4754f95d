"""A plan as text, and as files: the completed configuration, and those of other launchers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from steadytrain.components.pages.charts import aligned, text_bars
from steadytrain.components.plan.offer import Method, Offer, Size, policy
from steadytrain.components.plan.plan import Plan
from steadytrain.components.shared.config import RunConfig, TrainingConfig
from steadytrain.components.shared.config.optimizers import optimizer_spec
from steadytrain.components.shared.config.schedules import (
    rate_factor,
    schedule_settings,
    schedule_spec,
)
from steadytrain.components.shared.environment import TRAIN_IMAGE
from steadytrain.components.shared.quantities import duration
from steadytrain.components.shared.workspace import Workspace
from steadytrain.components.sizing.fit import Choice
from steadytrain.components.sizing.recipe import learning_rate
from steadytrain.components.sizing.time_cost import ASSUMED, THE_TABLE, Span
from steadytrain.components.train.launch.job import TrainJob
from steadytrain.components.train.launch.naming import job_name, run_labels
from steadytrain.components.train.launch.own_pod import OwnPod
from steadytrain.components.train.launch.pods import agent_command
from steadytrain.components.train.launch.process import RANK_PROGRAM
from steadytrain.components.train.offloaded import folder_of
from steadytrain.components.train.strategy.zero_config import zero_config
from steadytrain.components.train.transformers_script import TransformersRun

_COLUMNS: Final = 60


def curve(training: TrainingConfig, steps: int, peak: float) -> Iterator[str]:
    """Yield a line with a bar for each part of the steps, and a line with the rates at its ends.

    Args:
        steps: optimizer steps of the full run, at least 1.
        peak: learning rate after warm-up.

    Raises:
        BadInput: the schedule rejects its options, or has no factor for a step.
    """
    settings, kind = schedule_settings(training, steps, peak), training.lr_scheduler_type
    columns = min(steps, _COLUMNS)
    shown = [column * (steps - 1) // max(1, columns - 1) for column in range(columns)]
    rates = [peak * rate_factor(step, kind=kind, settings=settings) for step in shown]
    highest = max(rates) or 1.0
    yield text_bars(rate / highest for rate in rates)
    lower = ", before validation lowers it" if schedule_spec(kind).adapts else ""
    yield (
        f"{kind}: {rates[0]:.3g} at the first step, {max(rates):.3g} at most, "
        f"{rates[-1]:.3g} at step {steps:,}{lower}"
    )


_UNKNOWN = "not known"
_TRACED = "no formula for {}: sizes and activations come from a trace on fake tensors"


def render(plan: Plan) -> str:
    """Return the plan's text; it is the same for the same plan."""
    parts = (
        _head,
        _decided,
        _groups,
        _schedule,
        _memory,
        _spending,
        _methods,
        _scaling,
        _gpus,
        _foot,
    )
    return "\n\n".join(filter(None, ("\n".join(part(plan)) for part in parts)))


def summary(plan: Plan) -> str:
    """Return hardware, what is trained and how, memory, hours and cost in one line."""
    job, offer = plan.job, plan.offer
    total, capacity = plan.choice.memory.total / 1e9, plan.choice.capacity / 1e9
    method = [] if offer.how.startswith(offer.method) else [offer.method]
    parts = [f"{job.machine.ranks} x {job.machine.gpu.name}", *method, offer.how]
    parts.append(f"{total:.1f} of {capacity:g} GB")
    for unit, span in (("hours", offer.hours), ("USD", offer.usd)):
        parts.append(f"{unit} {_UNKNOWN}" if span is None else f"{_span(span)} {unit}")
    if plan.works:
        return ", ".join(parts)
    nearest = f"; nearest: {'; '.join(plan.remedies)}" if plan.remedies else ""
    return f"DOES NOT WORK: {'; '.join(plan.problems)}{nearest} ({', '.join(parts)})"


def _head(plan: Plan) -> Iterator[str]:
    job = plan.job
    trained = "" if plan.trained == job.shape.parameters else f", {count(plan.trained)} trained"
    yield f"model     {job.name}: {count(job.shape.parameters)} parameters{trained}"
    if job.shape.traced:
        yield f"          {_TRACED.format(job.shape.family)}"
    by = "" if plan.chosen_by == "given" else f", chosen by {plan.chosen_by}"
    yield f"hardware  {job.machine}{by}"
    total, capacity = plan.choice.memory.total / 1e9, plan.choice.capacity / 1e9
    if plan.works:
        yield f"verdict   fits: {total:.1f} of {capacity:g} GB on each {job.machine.gpu.kind}"
        return
    yield "verdict   DOES NOT WORK"
    yield from (f"  problem {problem}" for problem in plan.problems)
    yield from (f"  nearest {remedy}" for remedy in plan.remedies)
    if not plan.remedies and not plan.choice.fits:
        yield "  nearest nothing on this hardware; see the GPUs below"


def _decided(plan: Plan) -> Iterator[str]:
    yield "decisions"
    rows = [(item.field, item.text, item.reason) for item in plan.decisions]
    yield from aligned(rows, "  ")
    yield from (f"  remark: {remark}" for remark in plan.remarks)
    yield f"  if memory runs out: {', then '.join(plan.fallbacks) or 'nothing is left to reduce'}"


def _groups(plan: Plan) -> Iterator[str]:
    if not plan.groups:
        return
    yield "parameter groups"
    rows = [("parameters", "learning rate", "weight decay", "trained")]
    for group in plan.groups:
        start = group.unfreeze_at
        if start is None:
            rows.append((count(group.parameters), "", "", "never"))
            continue
        share = f"from {start:.0%} of the steps" if start < 1 else f"after step {start:g}"
        rows.append(
            (
                count(group.parameters),
                f"x {group.lr_scale:.3g}",
                f"{group.weight_decay:g}",
                share if start else "always",
            )
        )
    yield from aligned(rows, "  ")


def _schedule(plan: Plan) -> Iterator[str]:
    if not plan.length.steps:
        return
    yield "learning rate over the steps"
    lines = curve(plan.job.config.training, plan.length.steps, learning_rate(plan.decisions))
    yield from (f"  {line}" for line in lines)


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.choice.memory
    yield f"memory of a rank at its peak, {memory.moment}, in GB"
    for name, size in memory.parts.items():
        yield f"  {name:<16}{size / 1e9:8.2f}"
    yield f"  {'sum':<16}{memory.total / 1e9:8.2f}"
    if memory.host:
        yield f"  {'on the host':<16}{memory.host / 1e9:8.2f}{_host(plan.choice)}"
    if memory.disk:
        needed = memory.disk * plan.job.machine.per_node
        yield f"  {'on disk':<16}{memory.disk / 1e9:8.2f}, a node {needed / 1e9:.1f}"


def _host(choice: Choice) -> str:
    if choice.host_capacity is None:
        return ""
    return f", a node {choice.host_needed / 1e9:.1f} of {choice.host_capacity / 1e9:.1f}"


def _spending(plan: Plan) -> Iterator[str]:
    offer, length = plan.offer, plan.length
    yield "time and cost"
    steps = _UNKNOWN if length.steps is None else f"{length.steps:,}"
    yield f"  steps           {steps}: {length.source}"
    if advice := length.recommended:
        epochs, counts = (
            f"{low:,}" if low == high else f"{low:,} to {high:,}"
            for low, high in (advice.epochs, advice.steps)
        )
        few = "" if advice.epochs[1] == 1 else "s"
        yield f"  recommended     {epochs} epoch{few}, {counts} steps: {advice.reason}"
    timed = "" if offer.timed_by == THE_TABLE else f": {offer.timed_by}"
    yield f"  tokens/s        {_span(offer.tokens_per_second)}{timed}"
    yield f"  hours           {_span(offer.hours)}"
    yield f"  USD on demand   {_span(offer.usd)}"
    lost = plan.preemptions
    yield (
        f"  USD on spot     {_span(offer.spot_usd)}; preemptions every "
        f"{duration(plan.job.config.recovery.seconds_between_failures)} make it "
        f"{lost.factor:.2f} times as long, with a checkpoint every "
        f"{duration(lost.interval_seconds)}"
    )


def _methods(plan: Plan) -> Iterator[str]:
    if not plan.compared:
        return
    yield "methods on this hardware; they learn differently, so cost alone does not compare them"
    names = ("method", "GB of a rank", "how", "hours", "USD", "trade-off")
    yield from aligned([names, *map(_of_method, plan.compared)], "  ")


def _of_method(method: Method) -> tuple[str, ...]:
    offer = method.offer
    if offer is None:
        return (method.name, "", "does not work", "", "", method.trade_off)
    spans = map(_span, (offer.hours, offer.usd))
    return (method.name, f"{offer.memory_gb:.1f}", offer.how, *spans, method.trade_off)


def _scaling(plan: Plan) -> Iterator[str]:
    if not plan.scaling:
        return
    yield f"scaling policy: {policy(plan.job, plan.scaling)}"
    names = (f"nodes x {plan.job.machine.gpu.name}", "how", "tokens/s", "hours", "USD", "why")
    yield from aligned([names, *map(_of_size, plan.scaling)], "  ")


def _of_size(size: Size) -> tuple[str, ...]:
    offer = size.offer
    if offer is None:
        return (str(size), "does not work", "", "", "", size.reason)
    spans = (offer.tokens_per_second, offer.hours, offer.usd)
    return (str(size), offer.how, *map(_span, spans), size.reason)


def _gpus(plan: Plan) -> Iterator[str]:
    machine = plan.job.machine
    yield f"GPUs, {machine.ranks} of each, cheapest first; prices from {plan.prices}"
    if len(plan.methods) > 1:
        yield (
            f"  these train differently ({', '.join(plan.methods)}), and so learn differently: "
            "compare costs within one method"
        )
    names = ("GPU", "GB", "method", "how", "hours", "USD", "USD per million tokens", "best for")
    yield from aligned([names, *map(_row, plan.cheapest)], "  ")
    if plan.without_price:
        unknown = [offer.gpu for offer in plan.without_price]
        yield f"  no price, so not in the order above: {len(unknown)} ({', '.join(unknown)})"
    fastest = [offer.gpu for offer in plan.fastest]
    yield f"  fastest first: {', '.join(fastest) or 'none fits'}"
    out = [offer.gpu for offer in plan.offers if not offer.fits]
    if out:
        few = ", or are too few" if plan.job.hosts.of_a_cluster else ""
        yield f"  do not fit{few}: {', '.join(out)}"


def _row(offer: Offer) -> tuple[str, ...]:
    each = offer.usd_per_million_tokens
    return (
        offer.gpu,
        f"{offer.memory_gb:.1f} of {offer.capacity_gb:g}",
        offer.method,
        offer.how,
        _span(offer.hours),
        _span(offer.usd),
        _UNKNOWN if each is None else _number(each),
        offer.best_for,
    )


def _foot(plan: Plan) -> Iterator[str]:
    timed = plan.offer.timed_by not in (THE_TABLE, ASSUMED)
    if plan.measured or timed:
        memory = "a dry run on fake tensors" if plan.measured else "formula"
        speed = "measured on this machine with random weights" if timed else plan.offer.timed_by
        speed = "the table's" if speed == THE_TABLE else speed
        yield f"Memory by {memory}, speed {speed}; of other GPUs by formula and table."
        yield f"Memory was within {4 if plan.measured else 12} % of live tensors on a CPU in tests;"
    else:
        yield (
            "By formula; nothing was run. Memory was within 12 % of live tensors on a CPU in tests;"
        )
    yield "CUDA's context and fragmentation are assumptions, and so is how much of a GPU's peak"
    yield "a run reaches, which is why hours are an interval."


def _span(span: Span | None) -> str:
    return _UNKNOWN if span is None else f"{_number(span.low)} to {_number(span.high)}"


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    if value < 0.01:
        return "<0.01"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def count(parameters: int) -> str:
    """Format as 8.03 billion, 124 million or 61 thousand."""
    for size, name in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if parameters >= size:
            return f"{parameters / size:.3g}{name}"
    return str(parameters)


def texts(plan: Plan) -> dict[str, str]:
    """Return the text of the plan's files by name.

    steadytrain.yaml: the configuration with all open fields filled in.
    accelerate.yaml: for `accelerate launch` with your own program, if that can start
        these ranks.
    deepspeed.json: if the strategy is one of DeepSpeed's.
    trainjob.yaml: the first attempt as steadytrain would submit it to Kubeflow Trainer.
    training_args.json: the arguments for Transformers' Trainer, each with its reason.
    train_with_transformers.py: the same training with that Trainer, if it can do it.
    """
    config, batch = filled(plan), plan.choice.plan
    peer = TransformersRun.of(
        config, plan.decisions, batch.settings, batch.gradient_accumulation_steps
    )
    result = {
        **peer.texts(),
        "steadytrain.yaml": config.to_yaml(),
        "trainjob.yaml": yaml.safe_dump_all(trainjob(config), sort_keys=False),
    }
    if plan.has_accelerate:
        result["accelerate.yaml"] = yaml.safe_dump(accelerate_config(plan), sort_keys=False)
    if plan.choice.setting.deepspeed:
        result["deepspeed.json"] = json.dumps(deepspeed_config(plan), indent=2)
    return result


def filled(plan: Plan) -> RunConfig:
    """Return the configuration with every decision of the plan."""
    content = plan.job.config.model_dump()
    for decision in plan.decisions:
        *sections, field = decision.field.split(".")
        section_content = content
        for section in sections:
            section_content = section_content[section]
        if decision.value is not None:
            section_content[field] = decision.value
    # The strategy is chosen, and the rate is already scaled.
    content["compute"]["prefer"] = None
    content["training"]["lr_scaling"] = "none"
    content["training"]["base_global_batch_size"] = None
    content["compute"]["nodes"] = plan.job.machine.nodes
    content["compute"]["nproc_per_node"] = plan.job.machine.per_node
    if content["compute"]["device"] == "auto":
        content["compute"]["device"] = "cuda" if plan.job.machine.gpu.cuda else "cpu"
    if "gpu_resource" not in plan.job.config.compute.pods.model_fields_set:
        content["compute"]["pods"]["gpu_resource"] = plan.job.machine.gpu.resource
    return RunConfig.model_validate(content)


def accelerate_config(plan: Plan) -> dict[str, Any]:
    """Return the configuration that `accelerate config` would write."""
    setting, machine = plan.choice.setting, plan.job.machine
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": setting.sharing.accelerate.replace("GPU", machine.gpu.kind),
        "mixed_precision": {"fp32": "no"}.get(setting.precision, setting.precision),
        "num_machines": machine.nodes,
        "num_processes": machine.ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not machine.gpu.cuda,
    }
    if setting.deepspeed:
        content["deepspeed_config"] = {
            "deepspeed_config_file": "deepspeed.json",
            "zero3_init_flag": False,
        }
    if setting.sharing.accelerate == "FSDP":
        content["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": setting.offload == "all",
            "fsdp_activation_checkpointing": setting.recompute,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    return content


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """Return the strategy's configuration, with its micro-batch and accumulation."""
    setting, batch = plan.choice.setting, plan.choice.batch
    made = zero_config(
        stage=setting.sharing.zero_stage,
        bf16=setting.precision == "bf16",
        offload=setting.offload,
        parameters=plan.job.shape.parameters,
        trained=plan.trained,
        tensors=len(optimizer_spec(setting.optim).tensors),
        folder=folder_of(plan.job.config, 0),
    )
    return made | {
        "gradient_clipping": plan.job.config.training.max_grad_norm,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
    }


def trainjob(config: RunConfig) -> list[Mapping[str, Any]]:
    """Return the TrainingRuntime and the TrainJob of a run's first attempt."""
    folder = Workspace.of(config).attempts / "0001"
    job = TrainJob(
        name=job_name(config.run_id, 1),
        folder=str(folder),
        labels=run_labels(config.run_id),
        command=agent_command(
            config.compute, folder, ("python", *RANK_PROGRAM[1:]), python="python"
        ),
        compute=config.compute,
        recovery=config.recovery,
        own=OwnPod(image=TRAIN_IMAGE),
    )
    return [manifest for _, manifest in job.manifests()]
