"""The lists "Read, not run" of docs/sync.md and docs/amd.md: each line that they cite stands in what is installed.

Where one has moved, its row is to be read again before its number is changed: the row says what is taken for granted.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from mcore_rl.config.megatron_versions import megatron_version
from tests.house.source import ROOT

PAGES = ("docs/sync.md", "docs/amd.md")
READ_MEGATRON = "0.16.1"  # its lines are those of this version
# Sources that no wheel has: NCCL's and RCCL's, and vLLM's device code.
IN_NO_WHEEL = re.compile(r"src/.*|csrc/.*|cumem_allocator\.cpp")

LAYERS = "vllm/model_executor/layers"
EXPERTS = f"{LAYERS}/fused_moe/oracle/unquantized.py"
MLA = f"{LAYERS}/attention/mla_attention.py"
CUMEM = "vllm/device_allocator/cumem.py"
WORKER = "vllm/v1/worker/gpu_worker.py"
RELOAD = "vllm/model_executor/model_loader/reload/layerwise.py"
NCCL = "torch/include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
# (path below the installed packages, its lines as a page cites them, what stands there)
CITED = (
    ("torch/include/torch/csrc/distributed/c10d/Types.hpp", "124", "bool asyncOp = true;"),
    (NCCL, "56", "TORCH_NCCL_HIGH_PRIORITY"),
    (NCCL, "60", "TORCH_NCCL_BLOCKING_WAIT"),
    (NCCL, "151", 'kStoreDumpKey = "exception_dump"'),
    (NCCL, "167-176", "TearDown = 1"),
    ("torch/include/c10/cuda/CUDAAllocatorConfig.h", "136-147", 'get_env("PYTORCH_HIP_ALLOC_CONF")'),
    ("torch/multiprocessing/reductions.py", "153-170", "event_sync_required"),
    ("ray/_private/worker.py", "3474", "def kill("),
    ("vllm/distributed/weight_transfer/ipc_engine.py", "223", "physical_gpu_id = str(props.uuid)"),
    ("vllm/distributed/weight_transfer/ipc_engine.py", "280", "get_device_properties(self.device_index).uuid"),
    (f"{LAYERS}/linear.py", "206", "def process_weights_after_loading"),
    (f"{LAYERS}/vocab_parallel_embedding.py", "67", "def process_weights_after_loading"),
    (f"{LAYERS}/utils.py", "288-363", "def rocm_unquantized_gemm_impl"),
    (f"{LAYERS}/utils.py", "620", "def dispatch_unquantized_gemm"),
    (f"{LAYERS}/logits_processor.py", "113-116", "logits = logits * self.soft_cap"),
    (f"{LAYERS}/logits_processor.py", "142-145", "honoring head_dtype"),
    (RELOAD, "291-303", "layer.process_weights_after_loading(model_config.dtype)"),
    (RELOAD, "417-431", "buffer.data.copy_(getattr(layer, name))"),
    (MLA, "711-718", "is_aiter_triton_fp8_bmm_enabled"),
    (MLA, "1248", "W_UK, W_UV = split_kv_b_proj("),
    (MLA, "1256-1290", "replace_parameter(self, name, tensor, prefer_copy=True)"),
    (MLA, "1325-1333", 'replace_parameter(self, "W_UV"'),
    (f"{LAYERS}/fused_moe/experts/triton_moe.py", "118", "def _supports_current_device"),
    (f"{LAYERS}/fused_moe/experts/triton_moe.py", "627", "def _supports_current_device"),
    (f"{LAYERS}/fused_moe/unquantized_fused_moe_method.py", "228-232", "layer.w2_weight.data.copy_("),
    (EXPERTS, "62-67", "current_platform.is_rocm()"),
    (EXPERTS, "68-80", "_move_to_back(_AVAILABLE_BACKENDS"),
    (EXPERTS, "234", "if moe_config.is_lora_enabled:"),
    (EXPERTS, "305", "runner_backend = moe_config.moe_backend"),
    (EXPERTS, "305-326", "UnquantizedMoeBackend.AITER in AVAILABLE_BACKENDS"),
    (EXPERTS, "457-462", "unquantized_backend == UnquantizedMoeBackend.AITER"),
    (EXPERTS, "483", "convert_moe_weights_to_flashinfer_trtllm_block_layout"),
    (EXPERTS, "493-500", "return w13_weight.contiguous(), w2_weight.contiguous()"),
    ("vllm/config/model.py", "2090", "def head_dtype"),
    ("vllm/config/model.py", "2503", "def _get_head_dtype"),
    ("vllm/v1/worker/gpu/sample/sampler.py", "238-241", "new FP32 tensor"),
    ("vllm/v1/worker/gpu/sample/logprob.py", "17-56", "logits.to(tl.float32)"),
    ("vllm/v1/sample/sampler.py", "97", "logits.to(torch.float32)"),
    ("vllm/v1/sample/sampler.py", "308", "def compute_logprobs"),
    (WORKER, "298-311", "self._sleep_saved_buffers = {"),
    (WORKER, "315-325", "Memory usage increased after sleeping."),
    (WORKER, "316", "5.0 if current_platform.is_rocm()"),
    (WORKER, "337-346", "Restore the buffers after level 2 sleep"),
    (CUMEM, "211-218", "data.is_asleep and current_platform.is_rocm()"),
    (CUMEM, "268-273", "pin_memory=PIN_MEMORY"),
    (CUMEM, "361-364", "current_platform.is_rocm()"),
    (CUMEM, "367-428", "set_alloc_conf(prev_conf)"),
    ("vllm/device_allocator/alloc_conf.py", "25-29", "ALLOC_CONF_ENV_VARS"),
    ("vllm/device_allocator/alloc_conf.py", "79", "def with_conf_flag"),
    ("vllm/platforms/rocm.py", "138-156", "def _sync_hip_cuda_env_vars"),
    ("vllm/_aiter_ops.py", "2392-2401", "cls._AITER_ENABLED and cls._FP8BMM_ENABLED"),
    ("vllm/envs.py", "1376-1382", '"VLLM_ROCM_USE_AITER_FP8BMM"'),
    ("megatron/core/tensor_parallel/layers.py", "488", "torch.matmul(total_input, weight.t())"),
    ("megatron/core/models/gpt/gpt_model.py", "241", "self.output_layer = tensor_parallel.ColumnParallelLinear("),
)


def cited_by(page: str) -> set[tuple[str, str]]:
    """(name of a file, lines) of each citation of a page's list that a wheel has."""
    table = page.partition("\n## Read, not run\n")[2].partition("\n## ")[0]
    cited = set[tuple[str, str]]()
    path = ""
    for match in re.finditer(r"`([\w/.]*):(\d[\d,-]*)`", table):
        path = match[1] or path  # "`:305`" is of the file before it
        if not IN_NO_WHEEL.fullmatch(path):
            cited |= {(path.rpartition("/")[2], lines) for lines in match[2].split(",")}
    return cited


def moved(path: str, lines: str, code: str) -> str | None:
    """None where ``code`` stands within these lines of the installed file; else where it is."""
    package, _, below = path.partition("/")
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    text = "\n".join(
        Path(folder, below).read_text(encoding="utf-8")
        for folder in spec.submodule_search_locations
        if Path(folder, below).is_file()
    )
    first, _, last = lines.partition("-")
    now = [number for number, line in enumerate(text.splitlines(), 1) if code in line]
    if any(int(first) <= number <= int(last or first) for number in now):
        return None
    where = f"it is on line {', '.join(map(str, now))}" if now else "it is gone"
    return f"{path}:{lines} has no {code!r}: {where}"


def test_the_lists_cite_what_is_held_here_and_nothing_else() -> None:
    cited = set[tuple[str, str]]().union(*(cited_by((ROOT / page).read_text(encoding="utf-8")) for page in PAGES))
    assert cited == {(path.rpartition("/")[2], lines) for path, lines, _ in CITED}


def test_every_cited_line_stands_where_it_is_said_to() -> None:
    here = [row for row in CITED if not row[0].startswith("megatron/") or megatron_version() == READ_MEGATRON]
    assert [gone for row in here if (gone := moved(*row))] == []


def test_a_moved_line_is_found() -> None:
    assert "it is on line 79" in str(moved("vllm/device_allocator/alloc_conf.py", "80", "def with_conf_flag"))
    assert "it is gone" in str(moved("vllm/device_allocator/alloc_conf.py", "79", "no such code"))
