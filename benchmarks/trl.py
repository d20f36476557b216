"""GRPO here beside TRL's GRPOTrainer: same checkpoint, prompts, group size and response lengths, same machine and run.

    python benchmarks/trl.py --with-python TRL_ENVIRONMENT/bin/python [--gsm8k DIR] [--steps 5] [--rounds 1]
        [--lengths natural,equal] [--json results.json]

TRL_ENVIRONMENT: a virtual environment that sees this project's packages and adds TRL's own (docs/performance.md).
Nothing of TRL is changed: its trainer as it comes, with transformers' ``generate``: its vLLM mode needs a GPU.
Ours: as ``mcore-rl train`` runs it, two training processes (EP 2) and one vLLM engine, on the same cores.

A step: 16 prompts, 8 responses each, graded by their length in characters, one optimizer step, AdamW, clipped PPO loss
without KL, float32, no gradient checkpointing on either side.  The model: a mixture of experts of a million parameters
(tools/make_tiny_model.py).

``natural``: the model was fine-tuned on the solutions before, by ``mcore-rl sft``, and ends a response where it thinks
fit: some are short and some are long, as anywhere.  With ``--gsm8k`` (the folder of its jsonl files) prompts and
solutions are GSM8K's; without, generated sums of all difficulties, whose lengths differ less.
``equal``: random weights, and every response has exactly 48 tokens, which is the best there is for a program that pads.

Programs take turns, each in processes of its own that end before the next start.  Counted are samples a second from the
median of the steps after the first.  Target, at natural lengths: 3 times TRL's.  Exits with 1 where that is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET = 3.0
ROOT = Path(__file__).resolve().parents[1]
PROMPTS = 16
GROUP = 8
LONGEST = {"natural": 448, "equal": 48}  # tokens of a response
WARM_UP = 60  # steps of fine-tuning: enough to end an answer
LEARNING_RATE = 1e-5


def run(*command: object) -> None:
    """One of this project's programs, in silence."""
    subprocess.run([sys.executable, *map(str, command)], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def made(folder: Path, gsm8k: Path | None) -> tuple[dict[str, Path], Path]:
    """(models by lengths, training data), by the programs of this project."""
    data = folder / "data"
    tools = ROOT / "tools"
    if gsm8k is not None:
        run(tools / "prepare_data.py", "gsm8k", "--source", gsm8k, "--out", data)
        train = [data / "train.parquet"]
    else:
        levels = range(1, 5)
        for level in levels:
            wanted = ["--difficulty", level, "--train", 2000, "--val", 64, "--out", data / str(level)]
            run(tools / "prepare_data.py", "arithmetic", *wanted)
        train = [data / str(level) / "train.parquet" for level in levels]
    import pyarrow.parquet as pq

    whole = folder / "all" / "train.parquet"
    whole.parent.mkdir()
    rows = [row for path in train for row in pq.read_table(path).to_pylist()]
    random.Random(0).shuffle(rows)
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(rows), whole)
    run(tools / "make_tiny_model.py", "--data", whole.parent, "--out", folder / "random")
    run(
        "-m",
        "mcore_rl.cli",
        "sft",
        f"model.path={folder / 'random'}",
        f"data.train_files=[{whole}]",
        "data.train_batch_size=64",
        "data.max_length=768",
        "data.truncation=right",
        "actor.precision=float32",
        "actor.microbatch_tokens=8192",
        "actor.parallel.ep=2",
        "actor.optim.lr=2.0e-3",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={WARM_UP}",
        f"trainer.default_local_dir={folder / 'sft'}",
        "trainer.logger=[]",
    )
    return {"natural": folder / "sft" / "hf" / "final", "equal": folder / "random"}, whole


def ours(model: Path, train: Path, lengths: str, steps: int, folder: Path) -> dict[str, Any]:
    """Seconds of each step, from the run's own metrics."""
    reward = folder / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) / 100\n"
    )
    run(
        "-m",
        "mcore_rl.cli",
        "train",
        f"model.path={model}",
        f"data.train_files=[{train}]",
        f"trainer.default_local_dir={folder / 'run'}",
        f"data.train_batch_size={PROMPTS}",
        f"rollout.n={GROUP}",
        "data.max_prompt_length=512",
        f"data.max_response_length={LONGEST[lengths]}",
        f"rollout.ignore_eos={str(lengths == 'equal').lower()}",
        "data.shuffle=false",
        f"actor.ppo_mini_batch_size={PROMPTS}",
        "actor.precision=float32",
        "actor.microbatch_tokens=8192",
        "actor.parallel.ep=2",
        "trainer.n_gpus_per_node=2",
        "rollout.kv_cache_memory_bytes=268435456",
        f"rollout.max_num_seqs={PROMPTS * GROUP}",
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        "actor.use_kl_loss=false",
        "trainer.save_freq=0",
        f"trainer.total_training_steps={steps}",
        "trainer.resume_mode=off",
        "trainer.logger=[]",
        f"actor.optim.lr={LEARNING_RATE}",
        f"custom_reward_function.path={reward}",
    )
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": [line["time/step"] for line in lines],
        "length": statistics.fmean(line["response/length_mean"] for line in lines),
        "longest": max(line["response/length_max"] for line in lines),
        "generate_s": statistics.median(line["time/generate"] for line in lines[1:]),
    }


def theirs(model: Path, train: Path, lengths: str, steps: int, folder: Path) -> dict[str, Any]:
    """What ``--trl`` finds; runs in the other Python."""
    import pyarrow.parquet as pq
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = pq.read_table(train).to_pylist()[: PROMPTS * steps]
    ends: list[float] = []
    generating: list[float] = []
    counts: list[int] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **options: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        counts.extend(len(ids) for ids in completion_ids)
        return [len(completion[0]["content"]) / 100 for completion in completions]

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=LONGEST[lengths],
        learning_rate=LEARNING_RATE,
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        generation_kwargs={"min_new_tokens": LONGEST[lengths]} if lengths == "equal" else None,
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=tokenizer,
        callbacks=[Ends()],
    )
    draw = trainer._generate

    def timed(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        drawn = draw(*args, **options)
        generating.append(time.perf_counter() - begin)
        return drawn

    trainer._generate = timed
    begin = time.perf_counter()
    trainer.train()
    return {
        "seconds": [end - start for start, end in zip([begin, *ends], ends, strict=False)],
        "length": statistics.fmean(counts),
        "longest": max(counts),
        "generate_s": statistics.median(generating[1:]),
    }


def theirs_in(python: Path, model: Path, train: Path, lengths: str, steps: int, folder: Path) -> dict[str, Any]:
    """``theirs`` in a process of that Python."""
    result = folder / "trl.json"
    arguments = [str(each) for each in ("--trl", model, train, lengths, steps, folder, result)]
    # This folder is not on its path: the file would stand in the way of the package that it imports.
    command = (
        "import runpy, sys; sys.path.pop(0); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    subprocess.run([str(python), "-c", command, __file__, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    numbers: dict[str, Any] = json.loads(result.read_text())
    return numbers


def compared(options: argparse.Namespace, lengths: str, model: Path, train: Path, folder: Path) -> dict[str, Any]:
    """Rounds of both programs at ``lengths``, a table of them, and the ratio where there are both."""
    from rich.console import Console
    from rich.table import Table

    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "TRL": []}
    loads = []
    for number in range(options.rounds):
        place = folder / lengths / str(number)
        place.mkdir(parents=True)
        loads.append(os.getloadavg()[0])
        runs["ours"].append(ours(model, train, lengths, options.steps, place))
        if options.with_python is not None:
            loads.append(os.getloadavg()[0])
            runs["TRL"].append(theirs_in(options.with_python, model, train, lengths, options.steps, place))
    table = Table(title=f"GRPO, {PROMPTS} x {GROUP} samples of {lengths} lengths, float32")
    for heading in ("program", "response tokens", "longest", "step s", "of it generating s", "samples/s"):
        table.add_column(heading, justify="left" if heading == "program" else "right")
    speeds = {}
    for name, rounds in runs.items():
        if rounds:
            step = statistics.median(seconds for each in rounds for seconds in each["seconds"][1:])
            speeds[name] = PROMPTS * GROUP / step
            length = statistics.fmean(each["length"] for each in rounds)
            longest = max(each["longest"] for each in rounds)
            generating = statistics.median(each["generate_s"] for each in rounds)
            table.add_row(
                name, f"{length:.1f}", f"{longest:.0f}", f"{step:.2f}", f"{generating:.2f}", f"{speeds[name]:.1f}"
            )
    console = Console(width=max(Console().width, 100))
    console.print(table)
    console.print(f"{os.cpu_count()} cores, load before each run {', '.join(f'{x:.1f}' for x in loads)}")
    ratio = speeds["ours"] / speeds["TRL"] if "TRL" in speeds else None
    if ratio is not None:
        target = f" (target {TARGET:g})" if lengths == "natural" else ""
        console.print(f"ours / TRL at {lengths} lengths: {ratio:.2f}{target}")
    return {"lengths": lengths, "ratio": ratio, "rounds": runs, "loads": loads}


def main() -> int:
    """Exit status: 1 where the target is missed."""
    parser = argparse.ArgumentParser(description="GRPO here beside TRL's, samples per second")
    parser.add_argument("--with-python", type=Path, help="a Python that imports trl; without it nothing is compared")
    parser.add_argument("--gsm8k", type=Path, help="folder of GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--lengths", default="natural,equal")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--trl", nargs=6, help=argparse.SUPPRESS)  # what --with-python runs
    options = parser.parse_args()
    if options.trl is not None:
        model, train, lengths, steps, folder, result = options.trl
        Path(result).write_text(json.dumps(theirs(Path(model), Path(train), lengths, int(steps), Path(folder))))
        return 0
    with tempfile.TemporaryDirectory() as whole:
        models, train = made(Path(whole), options.gsm8k)
        comparisons = [compared(options, each, models[each], train, Path(whole)) for each in options.lengths.split(",")]
    if options.json is not None:
        options.json.write_text(json.dumps(comparisons, indent=2) + "\n")
    missed = [each for each in comparisons if each["lengths"] == "natural" and (each["ratio"] or TARGET) < TARGET]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
