"""A tiny task to try a machine or the program with: a mixture of experts with random weights, problems and a reward.

The reward is of the text alone, so that a model that cannot calculate has good and bad answers all the same, and its
weights move.  The doctor and the tests share the model and the settings, each with sizes of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.data.datasets import arithmetic_rows, write_rows
from mcore_rl.data.tiny_tokenizer import build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VALIDATED = 4
VOCAB_SIZE = 512
REWARD = '''"""Differs between the answers of any model."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 5 / 4
'''


@dataclass(frozen=True, kw_only=True)
class MixtureSizes:
    """The sizes of a mixture of two layers, with two attention heads and four experts, of which a token takes two."""

    hidden: int
    ffn: int
    head_dim: int
    kv_heads: int


# Of the doctor's: two heads of keys, which tp=2 divides.
SIZES = MixtureSizes(hidden=128, ffn=128, head_dim=64, kv_heads=2)


def write_mixture(directory: Path, tokenizer: PreTrainedTokenizerBase, sizes: MixtureSizes) -> None:
    """Writes a tiny mixture of experts for ``tokenizer`` as a Hugging Face checkpoint; equal each time."""
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    config = MixtralConfig(
        num_hidden_layers=2,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_attention_heads=2,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def write_model(directory: Path) -> Path:
    """Writes a tiny mixture of experts and its tokenizer as a Hugging Face checkpoint; equal each time."""
    rows = arithmetic_rows(1, 200, VALIDATED, 0)["train"]
    texts = [message["content"] for row in rows for message in row["prompt"]]
    write_mixture(directory, build_tokenizer(texts, directory, VOCAB_SIZE), SIZES)
    return directory


def write_task(directory: Path, prompts: int) -> Path:
    """Writes ``model``, ``train.parquet``, ``val.parquet`` and ``reward.py`` into ``directory``, and returns it."""
    write_model(directory / "model")
    rows: dict[str, list[Any]] = dict(arithmetic_rows(1, prompts, VALIDATED, 0))
    for split, of_split in rows.items():
        write_rows(of_split, directory / f"{split}.parquet")
    (directory / "reward.py").write_text(REWARD, encoding="utf-8")
    return directory


def task_overrides(
    task: Path, run_dir: Path, *, prompts: int, per_node: int, ep: int, precision: str, cache_bytes: int
) -> list[str]:
    """Overrides of ``mcore-rl train``: ``prompts`` with four short responses each and two updates a step.

    task: what ``write_task`` wrote.  per_node: training processes of a node.  cache_bytes: an engine's KV cache.
    """
    return [
        f"model.path={task}/model",
        f"data.train_files=[{task}/train.parquet]",
        f"data.val_files=[{task}/val.parquet]",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        f"custom_reward_function.path={task}/reward.py",
        "reward.num_workers=1",
        "algorithm=rloo",
        "actor.loss_mode=ppo_clip",
        "actor.loss_agg_mode=token_mean",
        f"actor.parallel.ep={ep}",
        f"actor.precision={precision}",
        f"actor.ppo_mini_batch_size={prompts // 2}",
        "actor.microbatch_tokens=512",
        "actor.optim.lr=1e-3",
        "rollout.n=4",
        "rollout.max_num_seqs=32",
        f"rollout.kv_cache_memory_bytes={cache_bytes}",
        "rollout.enforce_eager=true",
        f"trainer.n_gpus_per_node={per_node}",
        "trainer.logger=[]",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={run_dir}",
    ]
