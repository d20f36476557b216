"""The shadow of a recipe: the same run with a tiny model of the same family, a tiny data set and tiny batches, on CPU.

Everything that says what is computed stays: algorithm, losses, KL, roles, learning rates, clipping, recompute, filters,
how validation draws.  What becomes small is listed by key (``SMALLER``), and nothing else may differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.config.agent import AgentConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.data.arithmetic import Split, generate
from mcore_rl.data.datasets import DATASETS, published_rows, write_rows
from mcore_rl.data.tiny_model import write_tiny_model
from mcore_rl.data.tiny_tokenizer import build_tokenizer
from tests.support import tiny_models
from tests.support.pictures import picture
from tests.support.vllm_device import ON_VLLM_DEVICE

# Keys that a shadow has otherwise than its recipe, or groups of them.
SMALLER = (
    "model.path", "model.config_overrides", "critic.path", "teacher.path",
    *(f"data.{key}" for key in (
        "train_files", "val_files", "train_batch_size", "gen_batch_size", "max_prompt_length", "max_response_length",
        "mean_response_length", "max_length",
    )),
    "custom_reward_function.path", "reward.num_workers", "reward.overlong.length",
    *(f"rollout.{key}" for key in (
        "max_prompt_length", "max_response_length", "n", "val_kwargs.n", "tp", "dp", "ep", "dtype", "device",
        "gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_seqs", "enforce_eager", "quantization",
        "stop_token_ids", "agent.tool_parser", "agent.max_turns",
    )),
    *(f"reward_model.{key}" for key in ("device", "dtype", "enforce_eager")),
    *(f"trainer.{key}" for key in (
        "default_local_dir", "device", "logger", "nnodes", "n_gpus_per_node", "save_freq", "test_freq",
        "total_training_steps", "val_before_train",
    )),
    *(f"{role}.{key}" for role in ("actor", "critic", "process_reward") for key in (
        "parallel", "device", "precision", "microbatch_tokens", "ppo_mini_batch_size", "optim.lr_warmup_steps",
    )),
    *(f"teacher.{key}" for key in ("parallel", "device", "precision", "microbatch_tokens")),
)  # fmt: skip
STEPS = 2
LAYERS = 4  # one for each chunk of two stages of two
PROMPTS, SAMPLES = 4, 2
PROMPT_TOKENS, RESPONSE_TOKENS = 208, 16
FAMILIES = ("deepseek_v3", "gemma2", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
WITH_PICTURES = ("geo3k",)
SEEING = ("qwen2_5_vl", "qwen3_vl_moe")
TEACHER = "qwen3_moe"  # of the recipe with a teacher
# What an agent's tokens after a prompt need: some turns of a random model, and what others say between them.
AGENT_PROMPT_TOKENS, AGENT_TOKENS, AGENT_TURNS = 640, 640, 3
# A random model writes no call: one is read in what it says by its length.
PARSER = """
def read_calls(text):
    calls = [{"name": "calc_gsm8k_reward", "arguments": {"answer": str(len(text))}}]
    calls += [{"name": "python", "arguments": {"code": f"print({len(text)} * 7)"}}]
    return calls[:1] if len(text) % 2 else calls[1:]
"""
# A random model answers nothing right: with the grader's verdict alone all rewards would be 0.
REWARD = """
from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.registry import grader_of
from mcore_rl.rewards.score import RewardRequest


def compute_score(data_source, solution_str, ground_truth, extra_info):
    request = RewardRequest(("shadow", 0), data_source, solution_str, ground_truth)
    return grader_of(data_source)(request, RewardConfig()).value + sum(map(ord, solution_str)) % 5 / 4
"""


def write_task(directory: Path) -> Path:
    """``data/NAME/SPLIT.parquet`` as tools/prepare_data.py makes them, ``models/FAMILY``, and ``reward.py``."""
    texts = []
    for name, dataset in DATASETS.items():
        for split, rows in published_rows(name, str(_source(directory / "source" / name, name))).items():
            said = [
                [*(message["content"] for message in row["prompt"]), row["extra_info"]["answer"] or ""] for row in rows
            ]
            if name not in WITH_PICTURES:  # no model of a shadow is asked about one
                texts += [text for of_row in said for text in of_row]
            write_rows(rows, directory / "data" / _folder(name) / f"{split}.parquet")
        assert set(dataset.splits) == {path.stem for path in (directory / "data" / _folder(name)).iterdir()}
    for family in FAMILIES:
        tokenizer = build_tokenizer(texts, directory / "models" / family, 512)
        tiny_models.save(
            family,
            directory / "models" / family,
            num_hidden_layers=LAYERS,
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    for family in SEEING:
        write_tiny_model(directory / "models" / family, directory / "data" / "geo3k", family=family)
    (directory / "reward.py").write_text(REWARD)
    (directory / "parser.py").write_text(PARSER)
    return directory


def shadow(run: RunConfig | SftConfig, family: str, task: Path, directory: Path) -> list[str]:
    """Overrides that make ``run`` its shadow on the files of ``write_task``.  directory: of the run."""
    parallel, world_size = reduced(run.actor.parallel, run.trainer.world_size)
    files = {
        key: "[" + ",".join(f"{task}/{path}" for path in getattr(run.data, key)) + "]"
        for key in ("train_files", "val_files")
    }
    overrides = [
        f"model.path={task}/models/{family}",
        *(f"data.{key}={value}" for key, value in files.items()),
        f"data.train_batch_size={PROMPTS}",
        *_layout("actor", parallel),
        "actor.precision=float32",  # in which trainer and sampler must agree closely
        "actor.microbatch_tokens=1024",
        ON_VLLM_DEVICE["trainer"],
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={world_size}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.save_freq=0",
        "trainer.val_before_train=false",
        "trainer.logger=[]",
        f"trainer.default_local_dir={directory}",
    ]
    if isinstance(run, SftConfig):
        warmup = f"actor.optim.lr_warmup_steps={min(run.actor.optim.lr_warmup_steps, STEPS - 1)}"
        return [*overrides, f"data.max_length={PROMPT_TOKENS + RESPONSE_TOKENS}", warmup]
    agent = _of_agent(run, task) if has_agent(run) else []
    if "teacher" in run.roles:
        parallel, _ = reduced(run.teacher.parallel, run.trainer.world_size)
        overrides += [f"teacher.path={task}/models/{TEACHER}", *_layout("teacher", parallel)]
        overrides.append("teacher.microbatch_tokens=1024")
    return [*overrides, *_of_run(run, world_size), *agent, f"custom_reward_function.path={task}/reward.py"]


def has_agent(run: RunConfig | SftConfig) -> bool:
    """Whether the rows of a recipe are an agent's."""
    return isinstance(run, RunConfig) and run.rollout.agent != AgentConfig()


def _of_agent(run: RunConfig, task: Path) -> list[str]:
    """Half of the tokens end a turn, so that there are several; calls are read by a parser of the shadow's."""
    ends = ",".join(map(str, range(3, 512, 2)))
    parser = [f"rollout.agent.tool_parser={task}/parser.py:read_calls"] if run.rollout.agent.tools else []
    return [
        f"model.config_overrides.max_position_embeddings={AGENT_PROMPT_TOKENS + AGENT_TOKENS}",
        "model.config_overrides.rope_parameters={rope_type: default, rope_theta: 10000.0}",
        f"data.max_prompt_length={AGENT_PROMPT_TOKENS}",
        f"data.max_response_length={AGENT_TOKENS}",
        "actor.microbatch_tokens=2048",
        f"rollout.stop_token_ids=[{ends}]",
        f"rollout.agent.max_turns={AGENT_TURNS}",
        *parser,
    ]


def _of_run(run: RunConfig, world_size: int) -> list[str]:
    updates = run.data.train_batch_size // run.actor.ppo_mini_batch_size
    overrides = [
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={RESPONSE_TOKENS}",
        f"actor.ppo_mini_batch_size={PROMPTS // 2 if updates > 1 else PROMPTS}",
        f"rollout.n={min(run.rollout.n, SAMPLES)}",
        f"rollout.val_kwargs.n={min(run.rollout.val_kwargs.n, SAMPLES)}",
        "rollout.tp=1",
        "rollout.dp=1",
        "rollout.ep=1",
        "rollout.gpu_memory_utilization=0.5",
        "rollout.kv_cache_memory_bytes=33554432",
        "rollout.max_num_seqs=16",
        "rollout.enforce_eager=true",
        "rollout.quantization=none",  # a CPU has no kernels; tests/e2e/test_fp8_rollout.py trains with some
        "reward.num_workers=1",
    ]
    if run.reward.overlong.enable:
        overrides.append(f"reward.overlong.length={RESPONSE_TOKENS // 2}")
    if run.data.gen_batch_size is not None:
        overrides.append(f"data.gen_batch_size={2 * PROMPTS}")
    for role in (each for each in run.group_rows if not each.publishes):
        parallel, role_world_size = reduced(run.role_config(role).parallel, run.trainer.world_size)
        assert role_world_size == world_size
        overrides += [*_layout(role.name, parallel), f"{role.name}.microbatch_tokens=1024"]
    return overrides


def reduced(parallel: ParallelConfig, world_size: int) -> tuple[ParallelConfig, int]:
    """The layout and the processes of the shadow: two at most, and an axis that is more than 1 is 2 where it can be.

    Experts are spread over the ranks that tensors are cut over, so both stay.  A pipeline takes both processes; it goes
    before tensors, which are cut in more recipes, and after experts.  What has no axis is data parallel.
    """
    if world_size == 1:
        return ParallelConfig(), 1
    if parallel.ep > 1:
        return ParallelConfig(ep=2, tp=min(parallel.tp, 2)), 2
    if parallel.pp > 1:
        return ParallelConfig(pp=2, vpp=min(parallel.vpp, 2)), 2
    return ParallelConfig(tp=min(parallel.tp, 2), cp=1 if parallel.tp > 1 else min(parallel.cp, 2)), 2


def differing(run: object, other: object, prefix: str = "") -> list[str]:
    """Dotted keys of two plain configurations that are not equal."""
    if not (isinstance(run, Mapping) and isinstance(other, Mapping)):
        return [] if run == other else [prefix]
    keys = sorted(run.keys() | other.keys())
    return [key for name in keys for key in differing(run.get(name), other.get(name), f"{prefix}.{name}".lstrip("."))]


def metrics_of(directory: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def rollouts_of(directory: Path, step: int) -> list[dict[str, Any]]:
    """The samples of a step."""
    rows: list[dict[str, Any]] = pq.read_table(directory / "rollouts" / f"step_{step}.parquet").to_pylist()
    return rows


def _layout(role: str, parallel: ParallelConfig) -> list[str]:
    sizes = [f"{role}.parallel.{axis}={getattr(parallel, axis)}" for axis in ("tp", "pp", "vpp", "cp", "ep", "etp")]
    return [*sizes, f"{role}.parallel.pipeline_layers=null"]


def _folder(name: str) -> str:
    """Of a data set's files, as recipes name it."""
    return name.removesuffix("-math")


def _source(directory: Path, name: str) -> Path:
    """A few records as the authors of ``name`` publish them, about sums."""
    directory.mkdir(parents=True)
    for split in DATASETS[name].splits:
        kind, count = (Split.train, 24) if split == "train" else (Split.validation, 3)
        records = [_record(name, each.question, each.answer) for each in generate(1, count, 0, kind)]
        if name in WITH_PICTURES:
            pq.write_table(pa.Table.from_pylist(records), directory / f"{split}.parquet")
            continue
        lines = (json.dumps(record) for record in records)
        (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def _record(name: str, question: str, answer: str) -> dict[str, Any]:
    if name == "eurus2-rl":  # odd answers are asked for as programs
        source, ability, truth = "numina_cn_k12", "math", answer
        if int(answer) % 2:
            source, ability, truth = "taco", "code", json.dumps({"inputs": [question], "outputs": [answer]})
        prompt = [{"role": "system", "content": "Say it."}, {"role": "user", "content": question}]
        return {"data_source": source, "prompt": prompt, "ability": ability, "reward_model": {"ground_truth": truth}}
    if name.startswith("gsm8k"):
        return {"question": question, "answer": f"It is {answer}.\n#### {answer}"}
    if name in WITH_PICTURES:
        image = {"bytes": picture(seed=len(question)), "path": None}
        return {"images": [image], "problem": f"<image>{question}", "answer": answer}
    if name == "math":
        return {"problem": question, "solution": f"It is $\\boxed{{{answer}}}$."}
    return {"problem": question, "answer": answer}
