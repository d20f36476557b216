"""GRPO here beside TRL's GRPOTrainer: same checkpoint, prompts, group size and response lengths, same machine and run.

    python benchmarks/trl.py --with-python TRL_ENVIRONMENT/bin/python [--steps 6] [--rounds 2] [--json results.json]

TRL_ENVIRONMENT: a virtual environment that sees this project's packages and adds TRL's own (docs/performance.md).
Nothing of TRL is changed: its trainer as it comes, with transformers' ``generate``: its vLLM mode needs a GPU.
Ours: as ``mcore-rl train`` runs it, two training processes (EP 2) and one vLLM engine, on the same cores.

A step: 32 prompts of generated arithmetic, 8 responses each, of exactly 48 tokens (no end token stops one), graded by
their length in characters, one optimizer step, AdamW, clipped PPO loss without KL, float32, no gradient checkpointing
on either side.  The model: a mixture of experts of a million parameters, random (tools/make_tiny_model.py).
Programs take turns, each in processes of its own that end before the next start.  Counted are samples a second from the
median of the steps after the first.  Target: at least 3 times TRL's.  Exits with 1 where that is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET = 3.0
ROOT = Path(__file__).resolve().parents[1]
PROMPTS, GROUP, RESPONSE = 32, 8, 48
LEARNING_RATE = 1e-5


def made(folder: Path) -> tuple[Path, Path]:
    """(model, training data), by the tools of this repository."""
    model, data, tools = folder / "model", folder / "data", ROOT / "tools"
    wanted = ["--difficulty", "1", "--train", "2000", "--val", "64"]
    for command in (
        [tools / "prepare_data.py", "arithmetic", *wanted, "--out", data],
        [tools / "make_tiny_model.py", "--data", data, "--out", model],
    ):
        subprocess.run([sys.executable, *map(str, command)], check=True, stdout=subprocess.DEVNULL)
    return model, data / "train.parquet"


def ours(model: Path, train: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Seconds of each step, from the run's own metrics."""
    reward = folder / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) / 100\n"
    )
    subprocess.run(
        [
            sys.executable, "-m", "mcore_rl.cli", "train", f"model.path={model}", f"data.train_files=[{train}]",
            f"trainer.default_local_dir={folder / 'run'}", f"data.train_batch_size={PROMPTS}", f"rollout.n={GROUP}",
            "data.max_prompt_length=64", f"data.max_response_length={RESPONSE}", "rollout.ignore_eos=true",
            f"actor.ppo_mini_batch_size={PROMPTS}", "actor.precision=float32", "actor.microbatch_tokens=8192",
            "actor.parallel.ep=2", "trainer.n_gpus_per_node=2", "rollout.kv_cache_memory_bytes=134217728",
            f"rollout.max_num_seqs={PROMPTS * GROUP}", "trainer.val_before_train=false", "trainer.test_freq=0",
            "trainer.save_freq=0", f"trainer.total_training_steps={steps}", "trainer.resume_mode=off",
            "trainer.logger=[]", f"actor.optim.lr={LEARNING_RATE}", f"custom_reward_function.path={reward}",
        ],
        check=True, stdout=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": [line["time/step"] for line in lines],
        "length": statistics.fmean(line["response/length_mean"] for line in lines),
        "generate_s": statistics.median(line["time/generate"] for line in lines[1:]),
    }


def theirs(model: Path, train: Path, steps: int, folder: Path) -> dict[str, Any]:
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
    lengths: list[int] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **options: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [len(completion[0]["content"]) / 100 for completion in completions]

    config = GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=steps, per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP, max_completion_length=RESPONSE, learning_rate=LEARNING_RATE, beta=0.0, bf16=False,
        gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1, use_cpu=True,
        generation_kwargs={"min_new_tokens": RESPONSE}, disable_tqdm=True,
    )  # fmt: skip
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
        found = draw(*args, **options)
        generating.append(time.perf_counter() - begin)
        return found

    trainer._generate = timed
    begin = time.perf_counter()
    trainer.train()
    return {
        "seconds": [end - start for start, end in zip([begin, *ends], ends, strict=False)],
        "length": statistics.fmean(lengths),
        "generate_s": statistics.median(generating[1:]),
    }


def theirs_in(python: Path, model: Path, train: Path, steps: int, folder: Path) -> dict[str, Any]:
    """``theirs`` in a process of that Python."""
    result = folder / "trl.json"
    arguments = [str(each) for each in ("--trl", model, train, steps, folder, result)]
    # This folder is not on its path: the file would stand in the way of the package that it imports.
    command = (
        "import runpy, sys; sys.path.pop(0); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    subprocess.run([str(python), "-c", command, __file__, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def main() -> int:
    """Exit status: 1 where the target is missed."""
    parser = argparse.ArgumentParser(description="GRPO here beside TRL's, samples per second")
    parser.add_argument("--with-python", type=Path, help="a Python that imports trl; without it nothing is compared")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--trl", nargs=5, help=argparse.SUPPRESS)  # what --with-python runs
    options = parser.parse_args()
    if options.trl is not None:
        model, train, steps, folder, result = options.trl
        Path(result).write_text(json.dumps(theirs(Path(model), Path(train), int(steps), Path(folder))))
        return 0
    from rich.console import Console
    from rich.table import Table

    found: dict[str, list[dict[str, Any]]] = {"ours": [], "TRL": []}
    loads = []
    with tempfile.TemporaryDirectory() as whole:
        model, train = made(Path(whole))
        for number in range(options.rounds):
            folder = Path(whole) / str(number)
            folder.mkdir()
            loads.append(os.getloadavg()[0])
            found["ours"].append(ours(model, train, options.steps, folder))
            if options.with_python is not None:
                loads.append(os.getloadavg()[0])
                found["TRL"].append(theirs_in(options.with_python, model, train, options.steps, folder))
    table = Table(title=f"GRPO, {PROMPTS} x {GROUP} samples of {RESPONSE} tokens, float32 (target: >= {TARGET} x)")
    for heading in ("program", "response tokens", "step s", "of it generating s", "samples/s"):
        table.add_column(heading, justify="left" if heading == "program" else "right")
    speeds = {}
    for name, rounds in found.items():
        if rounds:
            step = statistics.median(seconds for each in rounds for seconds in each["seconds"][1:])
            speeds[name] = PROMPTS * GROUP / step
            length = statistics.fmean(each["length"] for each in rounds)
            generating = statistics.median(each["generate_s"] for each in rounds)
            table.add_row(name, f"{length:.1f}", f"{step:.2f}", f"{generating:.2f}", f"{speeds[name]:.1f}")
    console = Console(width=max(Console().width, 100))
    console.print(table)
    console.print(f"{os.cpu_count()} cores, load before each run {', '.join(f'{x:.1f}' for x in loads)}")
    ratio = speeds["ours"] / speeds["TRL"] if "TRL" in speeds else None
    if ratio is not None:
        verdict = "[green]pass[/green]" if ratio >= TARGET else "[red]MISSED[/red]"
        console.print(f"ours / TRL: {ratio:.2f} (target {TARGET}) {verdict}")
    if options.json is not None:
        options.json.write_text(json.dumps({"ratio": ratio, "rounds": found, "loads": loads}, indent=2) + "\n")
    return 0 if ratio is None or ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
