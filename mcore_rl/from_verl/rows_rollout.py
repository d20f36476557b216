"""The rows of sampling and of rewards, and of verl's generation and evaluation."""

from __future__ import annotations

from typing import Any

from mcore_rl.from_verl.row import KeyRow, absent, gone, of_names, part, to
from mcore_rl.from_verl.rows_roles import profiler
from mcore_rl.from_verl.rows_run import STILLS, sizes

ROLLOUT = "actor_rollout_ref.rollout"
MICROBATCHES = "the actor's microbatches"
LENGTHS = "data.max_prompt_length plus data.max_response_length"
VLLM = "vLLM, in engines that answer as soon as each response is done"
AGENTS = "write rollout.agent.loops.NAME=FILE.py:CLASS, a loop of your own (docs/agents.md)"
OBSERVERS = "the run directory has metrics and samples; Ray's dashboard has its own"
OWN_DEVICES = "trainer.placement=separate gives engines devices of their own"
BFLOAT16 = "bfloat16 and float32 are here"
DTYPE = of_names(
    {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "float": "float32", "auto": None}, BFLOAT16
)
LIMIT = "pictures of a row: more is refused"
LIMIT_OF_ENGINE = "pictures of a row: more is refused, and 0 is a run of text"
PATCHES = "engines are given patches, and process no picture (docs/rollout.md)"


def or_any(most: Any) -> Any:
    """A number of pictures: 0 is null here."""
    return most or None


def engine_pictures(rollout: str) -> list[KeyRow]:
    """The rows of engines.  rollout: verl's group of them."""
    vllm = f"{rollout}.engine_kwargs.vllm"
    return [
        to(f"{vllm}.limit_mm_per_prompt.image", "data.max_images", or_any, LIMIT_OF_ENGINE),
        to(f"{rollout}.limit_images", "data.max_images", or_any, LIMIT),  # in verl, too, it goes before vLLM's
        absent(f"{vllm}.limit_mm_per_prompt.{{video,audio}}", STILLS),
        *sizes(f"{vllm}.mm_processor_kwargs"),
        gone(f"{vllm}.{{disable_mm_preprocessor_cache,mm_processor_cache_gb}}", PATCHES),
    ]


ROLLOUT_ROWS = [
    to(f"{ROLLOUT}.n", "rollout.n"),
    part(
        f"{ROLLOUT}.{{do_sample,temperature}}", "rollout.temperature", "sampling", "`do_sample=False` is temperature 0"
    ),
    to(f"{ROLLOUT}.top_p", "rollout.top_p"),
    to(f"{ROLLOUT}.top_k", "rollout.top_k"),
    to(f"{ROLLOUT}.ignore_eos", "rollout.ignore_eos"),
    to(f"{ROLLOUT}.seed", "rollout.seed", keeps=True),
    absent(f"{ROLLOUT}.full_determinism", "rollout.seed and batch_invariant_mode of actor.megatron are what there is"),
    part(
        f"{ROLLOUT}.val_kwargs.{{do_sample,temperature}}",
        "rollout.val_kwargs.temperature",
        "sampling",
        "`do_sample=False` is temperature 0 where verl samples synchronously; its asynchronous engines read the "
        "temperature alone",
    ),
    to(f"{ROLLOUT}.val_kwargs.n", "rollout.val_kwargs.n"),
    to(f"{ROLLOUT}.val_kwargs.top_p", "rollout.val_kwargs.top_p"),
    to(f"{ROLLOUT}.val_kwargs.top_k", "rollout.val_kwargs.top_k"),
    to(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.tp", note="verl's default was 1 until 0.5 and is 2 since"),
    part(
        f"{ROLLOUT}.{{data_parallel_size,expert_parallel_size}}",
        "rollout.ep",
        "replicas",
        "`rollout.dp` are replicas of the whole run, by itself all that the devices hold; verl's is of one engine",
        differs=True,
    ),
    absent(f"{ROLLOUT}.pipeline_model_parallel_size", "an engine is tensor and expert parallel"),
    to(f"{ROLLOUT}.gpu_memory_utilization", "rollout.gpu_memory_utilization"),
    to(f"{ROLLOUT}.max_num_seqs", "rollout.max_num_seqs", keeps=True),
    to(
        f"{ROLLOUT}.max_num_batched_tokens",
        "rollout.max_num_batched_tokens",
        keeps=True,
        note="left out: vLLM's choice",
    ),
    to(f"{ROLLOUT}.enforce_eager", "rollout.enforce_eager", keeps=True),
    to(f"{ROLLOUT}.enable_prefix_caching", "rollout.enable_prefix_caching"),
    to(f"{ROLLOUT}.{{free_cache_engine,enable_sleep_mode}}", "rollout.enable_sleep_mode"),
    to(f"{ROLLOUT}.dtype", "rollout.dtype", DTYPE, "left out: actor.precision", keeps=True),
    gone(f"{ROLLOUT}.{{prompt_length,response_length}}", "follow from data"),
    gone(f"{ROLLOUT}.max_model_len", LENGTHS),
    gone(f"{ROLLOUT}.{{name,mode}}", VLLM),
    gone(
        f"{ROLLOUT}.{{enable_chunked_prefill,cudagraph_capture_sizes,scheduling_policy,logprobs_mode,skip_tokenizer_init,"
        "disable_log_stats,moe_load_balance_metrics_interval}",
        "vLLM's choice",
    ),
    gone(
        f"{ROLLOUT}.{{load_format,layered_summon,update_weights_bucket_megabytes,multi_stage_wake_up}}",
        "an update comes before the first sample, from memory to memory",
    ),
    gone(f"{ROLLOUT}.layer_name_map.*", "names of weights are derived"),
    gone(f"{ROLLOUT}.checkpoint_engine.*", "weights go from Megatron's ranks into vLLM's along a plan made once"),
    gone(f"{ROLLOUT}.calculate_log_probs", "always"),
    gone(
        f"{ROLLOUT}.{{log_prob_max_token_len_per_gpu,log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu,"
        "log_prob_use_dynamic_bsz}",
        MICROBATCHES,
    ),
    gone(f"{ROLLOUT}.enable_rollout_routing_replay", "follows from actor.router_replay=r3"),
    part(
        f"{ROLLOUT}.quantization",
        "rollout.quantization rollout.allow_uncorrected",
        "quantisation",
        "`fp8` is `fp8_block`, of 128 by 128 as verl's; without `rollout_is` or `bypass_mode` here it takes "
        "`allow_uncorrected`",
    ),
    absent(f"{ROLLOUT}.quantization_config_file", "quantised checkpoints of TorchAO are not read"),
    gone(f"{ROLLOUT}.{{qat,mtp}}", "follow from the model's group"),
    absent(f"{ROLLOUT}.over_sample_rate", "nothing unfinished is thrown away; `rollout.partial=true` keeps it"),
    absent(f"{ROLLOUT}.use_fire_sampling", "not here"),
    absent(f"{ROLLOUT}.chat_scheduler", AGENTS),
    part(
        f"{ROLLOUT}.{{multi_turn.enable,agent.default_agent_loop}}",
        "rollout.agent.default_agent_loop",
        "agents",
        "`multi_turn.enable` is the loop `tool_agent`, for rows that name none",
    ),
    part(f"{ROLLOUT}.multi_turn.tool_config_path", "rollout.agent.tool_config_path", "agents", "the same file works"),
    part(
        f"{ROLLOUT}.multi_turn.interaction_config_path",
        "rollout.agent.interaction_config_path",
        "agents",
        "the same file works",
    ),
    part(f"{ROLLOUT}.multi_turn.format", "rollout.agent.tool_parser", "agents", "vLLM's parsers, by name"),
    part(
        f"{ROLLOUT}.multi_turn.{{max_assistant_turns,max_user_turns}}",
        "rollout.agent.max_turns",
        "agents",
        "turns of the model, 8 unless written; verl's are as many as the response has room for",
    ),
    part(f"{ROLLOUT}.multi_turn.max_tool_response_length", "rollout.agent.max_tool_response_length", "agents"),
    part(f"{ROLLOUT}.multi_turn.tool_response_truncate_side", "rollout.agent.tool_response_cut", "agents"),
    part(f"{ROLLOUT}.multi_turn.function_tool_path", "rollout.agent.tools", "agents", "FILE.py:FUNCTION each"),
    gone(
        f"{ROLLOUT}.multi_turn.max_parallel_calls",
        "all calls of a turn run, rollout.agent.max_parallel_calls at once; verl runs the first, by default one",
    ),
    gone(
        f"{ROLLOUT}.multi_turn.{{max_turns,num_repeat_rollouts,tokenization_sanity_check_mode,"
        "use_inference_chat_template}",
        "tokens that were drawn are trained, and never encoded again",
    ),
    absent(f"{ROLLOUT}.multi_turn.completion_callback", AGENTS),
    absent(f"{ROLLOUT}.agent.agent_loop_config_path", AGENTS),
    absent(f"{ROLLOUT}.agent.custom_async_server.{{name,path}}", "engines are vLLM's"),
    gone(f"{ROLLOUT}.agent.num_workers", VLLM),
    gone(f"{ROLLOUT}.engine_kwargs.{{vllm,sglang,trtllm}}", "an empty group"),
    gone(f"{ROLLOUT}.engine_kwargs.{{sglang,trtllm}}.*", "engines are vLLM's"),
    gone(f"{ROLLOUT}.engine_kwargs.vllm.swap_space", "vLLM's choice"),
    *engine_pictures(ROLLOUT),
    part(
        f"{ROLLOUT}.engine_kwargs.vllm.*",
        "rollout.engine",
        "engine_field",
        "arguments that change how an engine computes, and not what; others have keys of ours, or are refused",
    ),
    absent(f"{ROLLOUT}.disaggregation.enabled", "an engine prefills and decodes"),
    gone(
        f"{ROLLOUT}.disaggregation.{{bootstrap_port,decode_replicas,decode_tensor_model_parallel_size,ib_device,"
        "prefill_replicas,transfer_backend}",
        "read with disaggregation.enabled alone",
    ),
    part(
        f"{ROLLOUT}.{{nnodes,n_gpus_per_node}}",
        "trainer.placement rollout.dp",
        "asynchrony",
        f"with trainer.v1.trainer_mode=separate_async; {OWN_DEVICES}",
    ),
    gone(f"{ROLLOUT}.moe_tensor_parallel_size", "experts are sliced over rollout.tp, or whole with rollout.ep"),
    gone(f"{ROLLOUT}.standalone_gpu_memory_utilization", "engines are all alike: rollout.gpu_memory_utilization"),
    absent(f"{ROLLOUT}.{{skip_rollout,skip.enable}}", "responses are always drawn anew"),
    gone(f"{ROLLOUT}.{{skip_dump_dir,skip.action,skip.dump_dir,skip.max_dump_step}}", "read with skip alone"),
    gone(f"{ROLLOUT}.{{prometheus,trace}}.*", OBSERVERS),
    *profiler(ROLLOUT),
]

JUDGE = "reward_model"
PROGRAMS = "programs run here, confined: reward.code.timeout_s, reward.code.memory_mib"
MANAGER = "responses are graded one by one, in parallel, while others are drawn: reward.num_workers"
OWN_MANAGER = "a reward manager of one's own is not here: custom_reward_function.path, or reward_model"
MANAGERS = of_names(dict.fromkeys(("naive", "prime", "dapo", "rate_limited", "gdpo", "None")), OWN_MANAGER)
SOURCE = of_names({"register": None, "None": None}, OWN_MANAGER)
OVERLONG = "`math_dapo` is worth 1 or 0 here, 1 or -1 there: halve the factor"
CLASSIFIER = "a vLLM classifier on the rollout's devices"


def custom(verl: str) -> list[KeyRow]:
    """The rows of a reward function of the user's."""
    return [
        to(f"{verl}.path", "custom_reward_function.path", note="the same function works"),
        to(f"{verl}.name", "custom_reward_function.name"),
        to(f"{verl}.reward_kwargs.*", "custom_reward_function.reward_kwargs", note="given to the function, also here"),
    ]


def serving(verl: str) -> list[KeyRow]:
    """The rows of a reward model's engines.  verl: the group ``rollout`` of it."""
    return [
        to(f"{verl}.tensor_model_parallel_size", "reward_model.tp"),
        part(
            f"{verl}.gpu_memory_utilization",
            "reward_model.gpu_memory_utilization rollout.gpu_memory_utilization",
            "shares",
            "beside rollout.gpu_memory_utilization: both engines are awake on one device; verl wakes one at a time",
        ),
        to(f"{verl}.enforce_eager", "reward_model.enforce_eager", keeps=True),
        to(f"{verl}.max_num_seqs", "reward_model.max_num_seqs", keeps=True),
        to(f"{verl}.max_num_batched_tokens", "reward_model.max_num_batched_tokens", keeps=True),
        to(f"{verl}.max_model_len", "reward_model.max_length"),
        to(f"{verl}.dtype", "reward_model.dtype", DTYPE, keeps=True),
        gone(f"{verl}.*", "vLLM's choice"),
    ]


def overlong(verl: str) -> list[KeyRow]:
    """The rows of the soft punishment of long responses."""
    return [
        to(f"{verl}.enable", "reward.overlong.enable"),
        to(f"{verl}.len", "reward.overlong.length"),
        to(f"{verl}.penalty_factor", "reward.overlong.penalty_factor", note=OVERLONG, differs=True),
        gone(f"{verl}.log", "always"),
    ]


def sandbox(verl: str) -> list[KeyRow]:
    """The rows of a sandbox for programs."""
    return [gone(f"{verl}.{{url,max_concurrent,memory_limit_mb}}", PROGRAMS)]


REWARD_ROWS = [
    *custom("custom_reward_function"),
    *custom("reward.custom_reward_function"),
    to(f"{JUDGE}.enable", "reward_model.enable", bool, CLASSIFIER, differs=True),
    to("reward.reward_model.enable", "reward_model.enable", bool, CLASSIFIER, differs=True),
    to(f"{JUDGE}.model.path", "reward_model.model.path", needed=True),
    to("reward.reward_model.model_path", "reward_model.model.path", needed=True),
    to(
        f"{JUDGE}.model.input_tokenizer",
        "reward_model.model.tokenizer_path",
        note="the policy's, whose template the conversation has",
    ),
    to(f"{JUDGE}.max_length", "reward_model.max_length"),
    *serving(f"{JUDGE}.rollout"),
    *serving("reward.reward_model.rollout"),
    absent("{reward_model,reward.reward_model}.enable_resource_pool", CLASSIFIER),
    gone("{reward_model,reward.reward_model}.{nnodes,n_gpus_per_node}", CLASSIFIER),
    gone(
        f"{JUDGE}.{{strategy,load_weight,nccl_timeout,ulysses_sequence_parallel_size,forward_max_token_len_per_gpu,"
        "micro_batch_size,micro_batch_size_per_gpu,use_dynamic_bsz}",
        CLASSIFIER,
    ),
    gone(f"{JUDGE}.{{megatron,model.fsdp_config}}.*", CLASSIFIER),
    gone(f"{JUDGE}.model.{{external_lib,trust_remote_code,use_fused_kernels,use_remove_padding,use_shm}}", CLASSIFIER),
    gone(f"{JUDGE}.model.override_config", "an empty group"),
    *profiler(JUDGE),
    KeyRow("{reward_model.reward_manager,reward_manager.name,reward.reward_manager.name}", (), MANAGER, MANAGERS),
    KeyRow(
        "{reward_model.reward_loop_source,reward_manager.source,reward.reward_manager.source}",
        (),
        OWN_MANAGER,
        SOURCE,
        absent=True,
    ),
    gone(
        "{reward_model.reward_loop_class_name,reward_model.reward_loop_module_path,reward_manager.module.name,"
        "reward_manager.module.path,reward.reward_manager.module.name,reward.reward_manager.module.path}",
        "read with a manager of one's own alone, which is not here",
    ),
    gone("reward_model.{launch_reward_fn_async,use_reward_loop}", MANAGER),
    to("{reward_model,reward}.num_workers", "reward.num_workers", note="left out: one a core", keeps=True),
    *overlong("{reward_model,reward}.reward_kwargs.overlong_buffer_cfg"),
    *overlong("reward_model.overlong_buffer"),
    gone("{reward_model,reward}.reward_kwargs.max_resp_len", "data.max_response_length"),
    *sandbox("{reward_model.sandbox_fusion,reward.sandbox_fusion,sandbox_fusion}"),
]

SCRIPT = "python3 -m verl.trainer.main_generation is mcore-rl generate"
GENERATION_ROWS = [
    to("model.path", "model.path", needed=True),
    to("data.path", "data.files", lambda path: path if isinstance(path, list) else [path], needed=True),
    to("data.prompt_key", "data.prompt_key"),
    to("data.n_samples", "rollout.n", note="responses to each prompt"),
    to("data.output_path", "out", note="a parquet file with a column of responses", needed=True),
    gone("data.batch_size", "engines take all prompts, and answer as they can"),
    part("rollout.{do_sample,temperature}", "rollout.temperature", "sampling", "`do_sample=False` is temperature 0"),
    to("rollout.top_p", "rollout.top_p"),
    to("rollout.top_k", "rollout.top_k", lambda k: -1 if k == 0 else k, "0 is -1, all tokens"),
    to("rollout.ignore_eos", "rollout.ignore_eos"),
    to("rollout.prompt_length", "data.max_prompt_length"),
    to("rollout.response_length", "data.max_response_length"),
    to("rollout.dtype", "rollout.dtype", DTYPE, "left out: that of the checkpoint", keeps=True),
    to("rollout.gpu_memory_utilization", "rollout.gpu_memory_utilization"),
    to("rollout.enforce_eager", "rollout.enforce_eager", keeps=True),
    to("rollout.tensor_model_parallel_size", "rollout.tp"),
    part("trainer.{nnodes,n_gpus_per_node}", "rollout.dp", "generating_replicas", "replicas: devices / rollout.tp"),
    gone("trainer.device", "rollout.device is by itself the accelerator"),
    to("rollout.max_num_batched_tokens", "rollout.max_num_batched_tokens", keeps=True),
    to("rollout.max_num_seqs", "rollout.max_num_seqs", keeps=True),
    gone("rollout.{name,mode}", VLLM),
    gone("rollout.n", "verl draws data.n_samples of each prompt"),
    gone(
        "rollout.{max_model_len,load_format,free_cache_engine,disable_log_stats,enable_chunked_prefill,data_parallel_size,"
        "layered_summon,skip_tokenizer_init}",
        "vLLM's choice",
    ),
    gone(
        "rollout.{log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu,calculate_log_probs}",
        "nothing is trained",
    ),
    absent("rollout.use_fire_sampling", "not here"),
    gone("actor.*", "nothing is trained"),
    absent("model.external_lib", "no module is imported for a model"),
    gone("model.{trust_remote_code,use_remove_padding,use_shm}", "families are written here, and rows packed"),
    to("{ray_init,ray_kwargs.ray_init}.num_cpus", "ray_init.num_cpus"),
    to("{ray_init,ray_kwargs}.timeline_json_file", "ray_init.timeline_json_file"),
]

EVALUATION_ROWS = [
    to("data.path", "path", note="with responses, as mcore-rl generate writes it", needed=True),
    to("data.prompt_key", "prompt_key"),
    to("data.response_key", "response_key"),
    gone("data.{data_source_key,reward_model_key}", "the columns are data_source and reward_model"),
    *custom("custom_reward_function"),
    to("{ray_init,ray_kwargs.ray_init}.num_cpus", "ray_init.num_cpus"),
    to("{ray_init,ray_kwargs}.timeline_json_file", "ray_init.timeline_json_file"),
]
