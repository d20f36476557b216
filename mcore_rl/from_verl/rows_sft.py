"""The rows of supervised fine-tuning: verl's ``sft_trainer``, and ``fsdp_sft_trainer`` before it."""

from __future__ import annotations

from mcore_rl.from_verl.row import absent, gone, listed, of_names, or_all, or_never, part, to
from mcore_rl.from_verl.rows_engine import FSDP, FSDP_CP, megatron, optimizer
from mcore_rl.from_verl.rows_pictures import pictures
from mcore_rl.from_verl.rows_roles import RESUME, model
from mcore_rl.from_verl.rows_run import DEVICE, OWN_DATASET, RESUME_MODE

CUT = of_names({name: name for name in ("error", "left", "right")}, "`error`, `left` or `right`")
BATCHES = "one budget of tokens, which packed rows fill: the numbers of a run do not depend on it"
COLUMNS = "a row is `data.messages_key`, or `data.prompt_key` and `data.response_key`"

SFT_ROWS = [
    to("data.train_files", "data.train_files", listed, "always a list"),
    to("data.val_files", "data.val_files", listed, "always a list"),
    to("data.train_batch_size", "data.train_batch_size", note="rows of an optimizer step, also here"),
    part(
        "data.{use_dynamic_bsz,max_token_len_per_gpu,micro_batch_size_per_gpu}",
        "actor.microbatch_tokens",
        "fine_tuning_batches",
        BATCHES,
    ),
    gone("data.micro_batch_size", BATCHES),
    part("data.{messages_key,multiturn.enable,multiturn.messages_key}", "data.messages_key", "conversation", COLUMNS),
    part("data.{prompt_key,prompt_dict_keys}", "data.prompt_key", "conversation", COLUMNS),
    part("data.{response_key,response_dict_keys}", "data.response_key", "conversation", COLUMNS),
    gone("data.{tools_key,multiturn.tools_key}", "the column `tools` of a row is given to its chat template"),
    gone(
        "data.{enable_thinking_key,enable_thinking_default,multiturn.enable_thinking_key}",
        "data.chat_template_kwargs, for all rows",
    ),
    to("data.max_length", "data.max_length"),
    to("data.truncation", "data.truncation", CUT),
    to("data.train_max_samples", "data.train_max_samples", or_all, "-1 is null"),
    to("data.val_max_samples", "data.val_max_samples", or_all, "-1 is null"),
    to("data.apply_chat_template_kwargs", "data.chat_template_kwargs"),
    to("data.apply_chat_template_kwargs.*", "data.chat_template_kwargs"),
    gone("data.{pad_mode,balance_dp_token,use_shm,num_workers,ignore_input_ids_mismatch}", "rows are packed"),
    absent("data.chat_template", "the tokenizer's folder has the template: change it in your copy"),
    *pictures(),
    absent("data.custom_cls.{path,name}", OWN_DATASET),
    to("model.{path,partial_pretrain}", "model.path", needed=True),
    to("model.tokenizer_path", "model.tokenizer_path"),
    to("model.override_config.*", "model.config_overrides", note="fields of config.json"),
    *model("model", "actor"),
    gone("model.{strategy,fsdp_config}", FSDP),
    gone("model.fsdp_config.*", FSDP),
    *optimizer("optim", "actor.optim"),
    part("optim.{warmup_steps_ratio}", "actor.optim.warmup_ratio", "warmup", "a share of the run stays one"),
    part("optim.lr_scheduler", "actor.optim.lr_schedule", "decay", "`wsd` is not here"),
    gone("{optim,model}", "groups that are chosen by name: Megatron's AdamW, a Hugging Face model"),
    gone("{engine,model_engine}", "Megatron"),
    *megatron("engine", "actor"),
    to("{engine.ulysses_sequence_parallel_size,ulysses_sequence_parallel_size}", "actor.parallel.cp", note=FSDP_CP),
    gone("engine.*", FSDP),
    gone("use_remove_padding", "rows are packed"),
    gone("{checkpoint,trainer.checkpoint}.*", RESUME),
    gone("{profiler,global_profiler}.*", "trainer.profile_steps traces steps with torch's profiler"),
    to("trainer.total_epochs", "trainer.total_epochs"),
    to("trainer.total_training_steps", "trainer.total_training_steps"),
    to("trainer.project_name", "trainer.project_name", keeps=True),
    to("trainer.experiment_name", "trainer.experiment_name", keeps=True),
    part("trainer.logger", "trainer.logger", "loggers", "metrics.jsonl is always written"),
    to("trainer.nnodes", "trainer.nnodes", note="of torchrun, too"),
    to("trainer.n_gpus_per_node", "trainer.n_gpus_per_node", note="of torchrun, too"),
    to("trainer.save_freq", "trainer.save_freq", or_never, "never is 0, verl's -1; the end is always saved"),
    to("trainer.test_freq", "trainer.test_freq", or_never, "never is 0, verl's -1"),
    to("trainer.resume_mode", "trainer.resume_mode", RESUME_MODE, "`disable` is `off`, `resume_path` is `path`"),
    to("trainer.resume_from_path", "trainer.resume_from_path", lambda path: path or None, "a checkpoint of ours"),
    to("trainer.default_local_dir", "trainer.default_local_dir", note="everything of the run is there", keeps=True),
    to("trainer.max_ckpt_to_keep", "trainer.max_to_keep", note="and the best is always kept"),
    to("trainer.seed", "data.seed", note="another order of the same rows", keeps=True),
    to("trainer.device", "trainer.device", DEVICE, "by itself the accelerator"),
    gone(
        "trainer.{default_hdfs_dir,resume_path,balance_batch,profile_interval}", "checkpoints are in the run directory"
    ),
]
