"""`init` writes a configuration that explains itself, validates, and is what `run DATA` runs."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys

import pytest

from steadytrain.components.shared.config import load
from steadytrain.pipelines import config_commands
from steadytrain.pipelines.questionnaire import Answers
from steadytrain.pipelines.sources import open_source

from support.disks import fill, free, small_file_system
from support.odd import call

PRESET_MODEL = load("chat").model.base
ROWS = {
    "chat.jsonl": {"prompt": "How?", "completion": "So."},
    "classes.jsonl": {"text": "how to reset it", "label": "help"},
    "text.jsonl": {"text": "some: text # with signs"},
}


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, row in ROWS.items():
        (tmp_path / name).write_text(f"{json.dumps(row)}\n")
    return tmp_path


@pytest.mark.parametrize("name", ROWS)
def test_written_file_equals_the_configuration_of_run_data(data, name):
    done = call("init", "my.yaml", "--data", name, "--yes", folder=data)
    assert (done.code, done.err) == (0, "")
    assert load("my.yaml") == open_source(name, []).config
    assert "steadytrain run my.yaml" in done.out
    assert call("validate", "my.yaml", folder=data).code == 0


def test_each_field_has_its_meaning_and_the_reason_for_its_value(data):
    call("init", "--data", "chat.jsonl", "--yes", folder=data)
    lines = (data / "steadytrain.yaml").read_text().splitlines()
    fields = [i for i, line in enumerate(lines) if ":" in line and "#" not in line]
    fields = [i for i in fields if not lines[i].endswith(":")]
    assert len(fields) > 8
    for index in fields:
        assert lines[index - 1].strip().startswith("#"), lines[index]
    text = " ".join(line.strip(" #") for line in lines)
    assert "the record has the columns prompt, completion" in text
    assert "Here: from the preset chat." in text


def test_settings_and_nested_sections_are_written(data):
    options = ("--set", "data.columns.label=label", "--set", "training.seed=7", "--run", "mine")
    options += ("--set", "data.columns.slice=label", "--output", str(data / "o: 'x' #"))
    call("init", "my.yaml", "--data", "classes.jsonl", "--yes", *options, folder=data)
    config = load("my.yaml")
    assert (config.training.seed, config.run) == (7, "mine")
    assert config.data.columns.slice == "label"
    assert config.output == str(data / "o: 'x' #")


def test_file_that_exists_is_overwritten_only_on_request(data):
    (data / "my.yaml").write_text("mine")
    done = call("init", "my.yaml", "--data", "chat.jsonl", "--yes", folder=data)
    assert (done.code, (data / "my.yaml").read_text()) == (2, "mine")
    assert "--force" in done.err
    assert call("init", "my.yaml", "--data", "chat.jsonl", "--force", folder=data).code == 0
    assert load("my.yaml").name == "chat"


def test_learning_rate_is_left_to_the_rule_for_another_model(data):
    arguments = ("init", "my.yaml", "--data", "text.jsonl", "--model", "hub:org/model")
    assert call(*arguments, folder=data).code == 0
    config = load("my.yaml")
    assert (config.model.base, config.model.config) == ("hub:org/model", {})
    assert config.training.learning_rate is None


def test_task_that_needs_a_trained_model_cannot_begin_from_scratch(data):
    done = call("init", "my.yaml", "--data", "chat.jsonl", "--model", "scratch", folder=data)
    assert done.code == 2
    assert "supervised_finetuning starts from a trained model" in done.err
    assert not (data / "my.yaml").exists()


def test_missing_data_is_reported_without_a_terminal(data):
    done = call("init", folder=data)
    assert (done.code, "--data" in done.err) == (2, True)


MODEL = "hub:meta-llama/Llama-3.1-8B"


def answered(monkeypatch, *answers):
    """Answer the questions of a terminal, and return these with their defaults."""
    rest, asked = iter(answers), []

    def answer(question, **options):
        asked.append((question, options.get("default")))
        return next(rest)

    monkeypatch.setattr(config_commands.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(config_commands.typer, "prompt", answer)
    return asked


@pytest.mark.slow
def test_terminal_prompts_for_data_model_hardware_and_goal(data, monkeypatch):
    asked = answered(
        *(
            monkeypatch,
            "chat.jsonl",
            MODEL,
            "warp-drive",
            "a100",
            "41",
            "40",
            "12",
            "two",
            "2",
            "fastest",
        )
    )
    done = call("init", "my.yaml", "--set", "data.sequence_length=512", folder=data)
    assert done.code == 0, done
    assert [default for _, default in asked[:3]] == [None, PRESET_MODEL, "none"]
    assert [default for _, default in asked[4:]] == ["80", "80", "1", "1", "1", "balanced"]
    sizes = "A100-40 (40 GB), A100-80 (80 GB)"
    for part in ("GPU 'warp-drive'", sizes, "in nodes of 8", "'two' is not a number"):
        assert part in done.err
    config = load("my.yaml")
    assert config.model.base == MODEL
    assert (config.compute.device, config.compute.nproc_per_node) == ("cuda", 2)
    assert config.training.goal == "fastest"
    assert "steadytrain plan my.yaml --gpu A100-40" in done.out


def test_an_answer_that_cannot_be_used_is_asked_for_again(data, monkeypatch):
    odd = ("text.jsonl", "nope", "   ", "a100", "nan", "1e400", "80", "9" * 5000, "40", "\u0662")
    asked = answered(monkeypatch, *odd, "\ud800", " best ")
    done = call("init", "my.yaml", folder=data)
    assert done.code == 0, done
    assert len(asked) == len(odd) + 2
    assert "'nope'" in done.err
    config = load("my.yaml")
    assert (config.model.base, config.compute.nproc_per_node) == (None, 2)
    assert config.training.goal == "best"


def test_no_gpu_leaves_the_machine_and_asks_for_the_goal_alone(data, monkeypatch):
    asked = answered(monkeypatch, "text.jsonl", "scratch", "none", "balanced")
    assert call("init", "my.yaml", folder=data).code == 0
    assert len(asked) == 4
    config = load("my.yaml")
    assert (config.compute.device, config.compute.nproc_per_node) == ("auto", 1)
    assert config.training.goal == "balanced"


@pytest.mark.slow
def test_options_write_what_the_plan_decides_for_the_gpu(data):
    """The same as `plan`, for what a run does not choose itself."""
    words = ("--data", "chat.jsonl", "--model", MODEL, "--set", "data.sequence_length=512")
    words = (*words, "--gpu-type", "rtx4050", "--gpu-count", "2", "--yes", "--json")
    told = json.loads(call("init", "my.yaml", *words, folder=data).out)
    config = load("my.yaml")
    asked = ("--gpu", "rtx4050", "--gpus-per-node", "2", "--formula", "--json")
    basis = ("--set", "data.sequence_length=512", "--set", f"model.base={MODEL}")
    basis = (*basis, "--set", "training.learning_rate=null")
    plan = json.loads(call("plan", "chat.jsonl", *asked, *basis, folder=data).out)
    decided = {item["field"]: item["value"] for item in plan["decisions"]}
    assert decided["model.adapter.kind"] == config.model.adapter.kind == "qlora"
    assert decided["training.optim"] == config.training.optim == "paged_adamw_8bit"
    assert decided["training.bf16"] is config.training.bf16 is True
    assert config.training.micro_batch_size is None
    first, second = told["changes"]
    assert (first["answer"], second["answer"]) == ("--gpu-type rtx4050", "--gpu-count 2")
    assert first["fields"]["model.adapter.kind"] == ["none", "qlora"]
    assert second["fields"] == {"compute.nproc_per_node": [1, 2]}
    assert first["after"] == second["before"] != second["after"]
    assert second["after"].startswith("2 x RTX4050, qlora")
    assert "Here: for 2 x RTX4050" in (data / "my.yaml").read_text()


def test_what_is_set_is_not_replaced_by_the_plan(data):
    words = ("--set", "training.bf16=false", "--set", "training.learning_rate=0.003")
    words = ("--model", MODEL, "--gpu-type", "rtx4050", "--yes", *words)
    assert call("init", "my.yaml", "--data", "chat.jsonl", *words, folder=data).code == 0
    training = load("my.yaml").training
    assert (training.bf16, training.learning_rate) == (False, 0.003)


def test_hardware_without_a_plan_says_why(data):
    words = ("--data", "text.jsonl", "--model", "hub:org/model", "--gpu-count", "16", "--yes")
    done = call("init", "my.yaml", *words, folder=data)
    assert done.code == 0
    assert re.search(r"plan +none: .*org/model", done.out), done.out
    compute = load("my.yaml").compute
    assert (compute.nodes, compute.nproc_per_node, compute.device) == (2, 8, "cuda")


CPU = ("--set", "compute.device=cpu")


def test_a_goal_for_the_cpu_writes_nothing_for_a_gpu(data):
    words = ("--data", "text.jsonl", "--goal", "fastest", "--cores", "2", "--yes", *CPU)
    assert call("init", "my.yaml", *words, folder=data).code == 0
    config = load("my.yaml")
    assert (config.compute.device, config.compute.threads_per_rank) == ("cpu", 2)
    assert (config.training.bf16, config.training.fp16) == (False, False)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--gpu-type", "warp-drive"), "no GPU of that name"),
        (("--cores", "2"), "models that learn on the CPU alone; causal_lm uses GPUs"),
        (("--gpu-memory-gb", "24"), "has several such GPUs"),
        (("--gpu-type", "h100", "--gpu-memory-gb", "81"), "H100 (80 GB)"),
        (("--gpu-type", "none", "--gpu-count", "2"), "there are no GPUs to count"),
        (("--gpu-count", "12"), "in nodes of 8"),
        (("--model", "nope"), "no folder nope"),
        (("--gpu-count", "2", *CPU), "--gpu-count: compute.device is cpu"),
    ],
)
def test_answers_that_cannot_be_used_are_refused(data, words, part):
    done = call("init", "my.yaml", "--data", "text.jsonl", "--yes", *words, folder=data)
    assert done.code == 2
    assert part in done.err
    assert not (data / "my.yaml").exists()


@pytest.mark.slow
def test_a_pseudo_terminal_asks_and_shows_what_each_answer_changes(data):
    command = [sys.executable, "-m", "steadytrain.pipelines", "init", "my.yaml", "--data"]
    command += ["chat.jsonl", "--set", "data.sequence_length=512"]
    master, slave = pty.openpty()
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=data) as process:
        os.close(slave)
        os.write(master, f"{MODEL}\nrtx4050\n\n2\n\n".encode())
        seen = b""
        # The end of a pseudo-terminal is an error on Linux.
        with contextlib.suppress(OSError):
            while part := os.read(master, 4096):
                seen += part
        assert process.wait(300) == 0, seen
    os.close(master)
    text = seen.decode()
    for line in (
        "compute.nproc_per_node: 1 -> 2",
        "model.adapter.kind: none -> qlora",
        "training.goal: None -> balanced",
        "plan  2 x RTX4050, qlora",
        "was   1 x RTX4050, qlora",
    ):
        assert line in text
    assert load("my.yaml").compute.nproc_per_node == 2


@pytest.mark.slow
def test_a_table_is_asked_for_cores_and_memory_instead_of_gpus(data, monkeypatch):
    # No column determines the target: what does is left out, and the matrix shrinks.
    rows = [
        f"{','.join(str(n % k) for k in range(3, 28))},{'pn'[n * n % 101 > 50]}"
        for n in range(6000)
    ]
    (data / "table.csv").write_text("\n".join([f"{','.join(map(str, range(25)))},y", *rows]))
    asked = answered(monkeypatch, "0", "3", "nothing", "0.001")
    words = ("--data", "table.csv", "--set", "data.target=y")
    done = call("init", "my.yaml", *words, folder=data)
    assert done.code == 0, done
    cores = str(len(os.sched_getaffinity(0)))
    assert [question for question, _ in asked] == [*("CPU cores",) * 2, *("GB of memory",) * 2]
    assert asked[0][1] == cores
    for part in (
        "not asked: --model, since tabular_classification learns from scratch, here by lightgbm",
        "not asked: --gpu-type, --gpu-memory-gb, --gpu-count, since lightgbm learns",
        "not asked: --goal, since a plan for tabular_classification chooses no methods",
        "compute.pods.cpu: 4 -> 3",
        # 6,000 rows of 25 float64 columns.
        "matrix 1.2 MB; threads",
        "1 MB of memory: DOES NOT FIT",
    ):
        assert part in done.out, done.out
    compute = load("my.yaml").compute
    assert (compute.device, compute.threads_per_rank) == ("auto", 3)
    assert (compute.pods.cpu, compute.pods.memory) == ("3", "1M")


def test_images_are_asked_for_gpus_and_not_for_a_goal(data, monkeypatch):
    (data / "pets" / "cat").mkdir(parents=True)
    (data / "pets" / "cat" / "1.PNG").write_bytes(b"")
    asked = answered(monkeypatch, "scratch", "a100", "80", "2")
    done = call("init", "my.yaml", "--data", "pets", folder=data)
    assert done.code == 0, done
    assert [default for _, default in asked] == ["scratch", "none", "80", "1"]
    assert "task image_classification, since its 1 files are images" in done.out
    assert "not asked: --goal, since a plan for image_classification" in done.out
    assert "not asked: --cores, --host-memory-gb" in done.out
    assert "plan  none: 1 of 1 records are defective" in done.out
    compute = load("my.yaml").compute
    assert (compute.device, compute.nproc_per_node) == ("cuda", 2)


def test_series_are_asked_by_what_their_model_uses(data):
    (data / "sold.csv").write_text("day,sold\n2024-01-01,3\n")
    words = ("--data", "sold.csv", "--set", "data.task=forecasting", "--set", "data.target=sold")
    words += ("--set", "data.series={time: day, horizon: 1}", "--yes", "--force")
    done = call("init", "my.yaml", *words, "--gpu-count", "2", folder=data)
    assert (done.code, "--gpu-count: statsforecast learns forecasting" in done.err) == (2, True)
    assert call("init", "my.yaml", *words, "--cores", "2", folder=data).code == 0
    network = ("--set", "model={framework: pytorch, config: {model_type: nlinear}}")
    done = call("init", "my.yaml", *words, *network, "--gpu-type", "t4", folder=data)
    assert done.code == 0, done
    assert load("my.yaml").compute.device == "cuda"


def test_file_that_cannot_be_written_is_an_error(data):
    done = call("init", "text.jsonl/my.yaml", "--data", "text.jsonl", "--yes", folder=data)
    assert done.code == 2
    assert "cannot be written" in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("init", "steadytrain.yaml", "--data", "../text.jsonl", "--yes", "--force"),
        ("plan", "causal-lm", "--formula", "--gpu=t4", "--write=."),
        ("design", "causal-lm", "--write=."),
    ],
    ids=lambda words: words[0],
)
def test_full_disk_leaves_the_earlier_files(data, words):
    with small_file_system(data / "disk", "size=256k") as disk:
        assert call(*words, folder=disk).code == 0
        (disk / "steadytrain.yaml").chmod(0o600)
        (disk / ".gitignore").write_bytes(b"*.log\r\n")
        before = {path.name: path.read_bytes() for path in disk.iterdir()}
        fill(disk)
        done = call(*words, folder=disk)
        assert (done.code, "No space left" in done.err) == (2, True)
        free(disk)
        assert {path.name: path.read_bytes() for path in disk.iterdir()} == before
        assert call(*words, folder=disk).code == 0
        assert load(disk / "steadytrain.yaml")
        assert (disk / "steadytrain.yaml").stat().st_mode & 0o777 == 0o600


def test_any_end_of_a_line_in_a_name_reads_back_equal(data):
    name = "a\x85b\u2028c\u2029d.jsonl"
    (data / "text.jsonl").rename(data / name)
    done = call("init", "my.yaml", "--data", name, "--yes", folder=data)
    assert done.code == 0, done
    assert load(data / "my.yaml").data.source == [name]


@pytest.mark.parametrize("output", ["text.jsonl", "text.jsonl/inner", "/dev/null"])
def test_output_that_is_a_file_is_an_error(data, output):
    done = call("init", "my.yaml", "--data", "text.jsonl", "--yes", "-o", output, folder=data)
    assert done.code == 2
    assert "is not a folder" in done.err
    assert not (data / "my.yaml").exists()


def test_json_output(data):
    done = call("init", "my.yaml", "--data", "chat.jsonl", "--json", folder=data)
    told = json.loads(done.out)
    assert (told["file"], told["task"]) == ("my.yaml", "supervised_finetuning")


def test_data_are_never_overwritten(data):
    before = (data / "text.jsonl").read_bytes()
    done = call("init", "text.jsonl", "--data", "text.jsonl", "--yes", "--force", folder=data)
    assert done.code == 2
    assert "text.jsonl is the data itself" in done.err
    assert (data / "text.jsonl").read_bytes() == before


def test_keys_have_placeholders_and_git_leaves_the_real_ones_out(data):
    done = call("init", "my.yaml", "--data", "text.jsonl", "--yes", folder=data)
    assert "wrote .env.example" in done.out
    lines = (data / ".env.example").read_text().splitlines()
    keys = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_TOKEN"} <= keys.keys()
    assert all(re.fullmatch(r"your_[a-z0-9_]+_here", value) for value in keys.values())
    git = ["git", "-C", str(data)]
    subprocess.run([*git, "init", "-q"], check=True)
    for name in (".env", ".env.local"):
        (data / name).write_text("HF_TOKEN=real\n")
    subprocess.run([*git, "add", "."], check=True)
    added = subprocess.run([*git, "ls-files"], capture_output=True, text=True, check=True).stdout
    assert {".env.example", ".gitignore", "my.yaml"} <= set(added.split())
    assert not {".env", ".env.local"} & set(added.split())


def test_own_files_stay_and_missing_rules_are_added_once(data):
    (data / ".env.example").write_text("MINE=your_service_key_here\n")
    (data / ".gitignore").write_text("!.env.example\n.env*\n*.log")
    for _ in range(2):
        call("init", "my.yaml", "--data", "text.jsonl", "--yes", "--force", folder=data)
    assert (data / ".env.example").read_text() == "MINE=your_service_key_here\n"
    text = (data / ".gitignore").read_text()
    assert text == "!.env.example\n.env*\n*.log\n.env*\n!.env.example\n"


def test_no_env_writes_the_configuration_alone(data):
    call("init", "my.yaml", "--data", "text.jsonl", "--yes", "--no-env", folder=data)
    assert not (data / ".env.example").exists()
    assert not (data / ".gitignore").exists()


def test_mig_device_sets_the_resource_of_its_pods():
    settings = dict(Answers("a100-80-mig-1g.10gb").settings())
    assert settings["compute.pods.gpu_resource"] == "nvidia.com/mig-1g.10gb"
    assert "compute.pods.gpu_resource" not in dict(Answers("a100-80").settings())
