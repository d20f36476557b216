"""No file but the device layer names a vendor's runtime: everything else asks a ``Platform``."""

from __future__ import annotations

import re

from tests.house.source import code_words, complaints, python_files, refuse

VENDOR = re.compile(r"cuda|nccl|rccl|(?<![a-z])hip(?![a-z])", re.IGNORECASE)
DEVICE_LAYER = tuple(f"mcore_rl/parallel/{name}.py" for name in ("device", "device_details", "copies", "cpu"))

# Names that others chose.  Each must still be in use, or it goes.
ALLOWED = {
    "mcore_rl/parallel/pinned.py": {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"},  # torch's
    "mcore_rl/config/engine.py": {"cuda"},  # what a user writes: device=cuda
    "benchmarks/gpu_run/engine_alone.py": {"cudagraph_mode"},  # vLLM's name, on ROCm too
    "mcore_rl/rehearsal/rank.py": {"cuda"},  # the kind of device that a rehearsed engine believes in
    "mcore_rl/parallel/weight_gradient.py": {"fused_weight_gradient_mlp_cuda"},  # Apex's, which Megatron looks for
    "mcore_rl/parallel/groups.py": {
        "model_parallel_cuda_manual_seed",
        "get_cuda_rng_tracker",
    },  # Megatron's names; the CPU's as well
}
ALLOWED_FILES = (
    *DEVICE_LAYER,
    # They judge environments, before the package is there, and name the rungs of the set-up.
    "tools/check_environment.py",
    "tools/record_requirements.py",
    # Other people's keys, by their names.
    "mcore_rl/config/megatron_fields.py",
    "mcore_rl/config/megatron_versions.py",
    "mcore_rl/config/vllm_fields.py",
    "mcore_rl/from_verl/rows_roles.py",
    "mcore_rl/from_verl/rows_rollout.py",
    "mcore_rl/from_verl/rows_run.py",
    "mcore_rl/doctor/vendor_tools.py",  # reads what the vendors' tools print, and what their libraries are called
)


def vendor_words(path: str, text: str) -> list[str]:
    if not VENDOR.search(text):
        return []  # without parsing it
    allowed = ALLOWED.get(path, set())
    return [
        f"{path}:{line}: {word!r} names a vendor's runtime. Ask mcore_rl.parallel.device instead"
        for line, word in code_words(text)
        if VENDOR.search(word) and word not in allowed
    ]


def test_only_the_device_layer_names_a_vendor() -> None:
    paths = [path for path in python_files("mcore_rl", "tools", "benchmarks", "launch") if path not in ALLOWED_FILES]
    refuse(vendor_words, paths)


def test_every_exception_is_still_in_use() -> None:
    for path, words in ALLOWED.items():
        used = complaints(lambda _, text: [word for _, word in code_words(text)], [path])
        assert words <= set(used), f"{path} no longer says {words - set(used)}: drop the exception"


def test_the_rule_sees_names_attributes_strings_imports_and_keywords() -> None:
    bad = """
import torch.cuda
from torch.distributed import is_nccl_available
def use_hip(x): return x.is_cuda
backend = "rccl"
message = f"moved to {backend} on cuda"
f(cuda_graph=True)
"""
    split_complaints = [complaint.split(": ")[:2] for complaint in vendor_words("mcore_rl/x.py", bad)]
    words = [(place.rpartition(":")[2], text.split("'")[1]) for place, text in split_complaints]
    assert sorted(words) == [
        ("2", "torch.cuda"),
        ("3", "is_nccl_available"),
        ("4", "is_cuda"),
        ("4", "use_hip"),
        ("5", "rccl"),
        ("6", " on cuda"),
        ("7", "cuda_graph"),
    ]


def test_the_rule_leaves_words_for_people_and_words_like_them_alone() -> None:
    good = '''
"""Runs on CUDA and on HIP."""
def relationship(chip):  # as NCCL does
    "RCCL does too."
    return chip.ship
'''
    assert vendor_words("mcore_rl/x.py", good) == []


def test_an_exception_holds_for_its_file_and_its_word_alone() -> None:
    assert vendor_words("mcore_rl/config/engine.py", 'cuda = "cuda"') == []
    assert vendor_words("mcore_rl/config/model.py", 'cuda = "cuda"') != []
    assert vendor_words("mcore_rl/config/engine.py", "x.is_cuda") != []
