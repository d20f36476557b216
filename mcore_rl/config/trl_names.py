"""What TRL's GRPOTrainer and GRPOConfig call the settings of a run; docs/from_trl.md has the same table, with more."""

from __future__ import annotations

# TRL's name -> what to write here: the key, or a sentence.
OURS = {
    "adam_beta1": "actor.optim.betas=[BETA1,BETA2]",
    "adam_beta2": "actor.optim.betas=[BETA1,BETA2]",
    "args": "the keys of GRPOConfig one by one, docs/from_trl.md",
    "beta": "actor.kl_loss_coef, and actor.use_kl_loss=false for 0",
    "bf16": "actor.precision=bfloat16, the default",
    "epsilon": "actor.clip_ratio",
    "epsilon_high": "actor.clip_ratio_high",
    "eval_steps": "trainer.test_freq",
    "gradient_accumulation_steps": "data.train_batch_size and actor.ppo_mini_batch_size, which count prompts",
    "hub_model_id": "trainer.push_to_hub",
    "learning_rate": "actor.optim.lr",
    "logging_steps": "nothing: every step is logged",
    "loss_type": "actor.loss_agg_mode, or algorithm=NAME",
    "lr_scheduler_type": "actor.optim.lr_schedule",
    "max_completion_length": "data.max_response_length",
    "max_grad_norm": "actor.optim.clip_grad",
    "max_prompt_length": "data.max_prompt_length",
    "max_steps": "trainer.total_training_steps",
    "model_name": "model.path",
    "num_generations": "rollout.n",
    "num_iterations": "actor.ppo_epochs",
    "num_train_epochs": "trainer.total_epochs",
    "output_dir": "trainer.default_local_dir",
    "peft_config": "actor.lora.rank and actor.lora.alpha",
    "per_device_train_batch_size": "data.train_batch_size and actor.ppo_mini_batch_size, which count prompts",
    "processing_class": "model.tokenizer_path",
    "push_to_hub": "trainer.push_to_hub=OWNER/NAME",
    "report_to": "trainer.logger=[console,wandb]",
    "reward_funcs": "reward=FUNCTION or a list of them, in Python; custom_reward_function.path=FILE.py in yaml",
    "reward_weights": "custom_reward_function.weights",
    "run_name": "trainer.experiment_name",
    "save_steps": "trainer.save_freq",
    "scale_rewards": "algorithm=dr_grpo for False",
    "seed": "data.seed and rollout.seed",
    "temperature": "rollout.temperature",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
    "train_dataset": "dataset=ROWS, in Python; data.train_files=[FILE] in yaml",
    "use_vllm": "nothing: vLLM draws always",
    "warmup_ratio": "actor.optim.warmup_ratio",
    "warmup_steps": "actor.optim.lr_warmup_steps",
    "weight_decay": "actor.optim.weight_decay",
}


def trl_remedy(key: str) -> str:
    """What to write in the place of a setting that TRL has; "" if it has none of that name."""
    return f"TRL's {key} is here: {OURS[key]}" if key in OURS else ""
