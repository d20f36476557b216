"""CONTRIBUTING.md's table of what Megatron has too: each line that it cites stands in the version that is installed."""

from __future__ import annotations

import re

import pytest

from mcore_rl.config.megatron_versions import MEGATRON_VERSIONS, megatron_version
from tests.house.source import ROOT
from tests.support.megatron_source import source_of

# (path below megatron/core, its line in each of MEGATRON_VERSIONS, what stands there)
CITED = (
    ("ssm/gated_delta_net.py", (103, None), "if not HAVE_FLA:"),
    ("ssm/gated_delta_net.py", (297, None), "GDN does not support packed sequence"),
    ("ssm/gated_delta_net.py", (365, None), "-self.A_log.exp()"),
    ("ssm/gated_delta_net/common.py", (None, 141), "if not HAVE_FLA:"),
    ("ssm/gated_delta_net/common.py", (None, 444), "-A_log_local_cp.exp()"),
    ("ssm/gated_delta_net/gdn.py", (None, 98), "not self.config.deterministic_mode"),
    ("transformer/multi_latent_attention.py", (185, None), "isinstance(self.linear_proj, TELinear)"),
    ("transformer/multi_latent_attention.py", (None, 739), "gather_from_tensor_model_parallel_region(kv_combined)"),
    ("transformer/multi_latent_attention.py", (None, 942), "mla_rotary_interleaved=True"),
    ("transformer/mla_qk_norm_config.py", (None, 244), "qk_layernorm requires TransformerEngine"),
    ("transformer/attention.py", (1488, 1931), "gate = gate.reshape(*gate.shape[:2], -1"),
    ("transformer/attention.py", (1283, 1724), "hidden_size=self.hidden_size_per_attention_head"),
    ("models/gpt/gpt_model.py", (160, 178), "self.rotary_pos_emb = RotaryEmbedding("),
    ("models/gpt/gpt_model.py", (None, 719), "if output_processor is not None"),
    ("transformer/moe/router_replay.py", (92, 117), "self.replay_backward_list.append(topk_indices)"),
    ("transformer/moe/moe_utils.py", (554, 656), "topk(topk // group_topk"),
    ("transformer/moe/moe_utils.py", (724, 868), "if topk > 1 else scores"),
    ("transformer/moe/moe_utils.py", (1192, 1326), "if te_general_gemm is not None"),
    ("transformer/moe/experts.py", (910, 1352), "tokens_per_expert = tokens_per_expert.tolist()"),
    ("transformer/moe/moe_utils.py", (369, None), "token_indices.masked_select(routing_map)"),
    ("transformer/moe/moe_utils.py", (505, 607), "torch.split(input, split_sizes.tolist(), dim=0)"),
    ("transformer/mlp.py", (247, 354), "output += output_bias.unsqueeze(0)"),
    ("tensor_parallel/layers.py", (1228, 1413), 'setattr(self.bias, "sequence_parallel"'),
    ("tensor_parallel/layers.py", (886, 1017), 'setattr(self.weight, "allreduce"'),
    ("transformer/torch_norm.py", (32, 50), "sequence parallel not supported"),
    ("models/common/embeddings/rotary_pos_embedding.py", (98, 98), "original_max_position_embeddings=8192"),
    ("models/common/embeddings/rope_utils.py", (204, 222), ".tolist()"),
    ("models/common/embeddings/rope_utils.py", (None, 265), "output.narrow(0, output_offset"),
    ("transformer/dot_product_attention.py", (58, 58), "self.config.context_parallel_size == 1"),
    ("transformer/dot_product_attention.py", (153, 153), "assert packed_seq_params is None"),
    ("optimizer/optimizer.py", (355, 566), "p.data = p.data.cpu()"),
    ("distributed/distributed_data_parallel.py", (575, 636), "def offload_grad_buffers"),
    ("utils.py", (1205, 1330), "l2 = [[(torch.norm(tensor))"),
    ("optimizer/muon.py", (42, None), "class TensorParallelMuon"),
    ("optimizer/emerging_optimizers.py", (None, 160), "class TensorParallelMuon"),
    ("optimizer/optimizer_config.py", (None, 282), 'muon_tp_mode: str = "blockwise"'),
)


def cited_by(page: str) -> set[str]:
    """Each ``path:line`` of the table."""
    table = page.partition("## What Megatron does now, and what is ours\n")[2].partition("\n## ")[0]
    return set(re.findall(r"`([\w/]+\.py:\d+)`", table))


def moved(path: str, number: int, code: str) -> str | None:
    """None where ``code`` stands on that line of the installed Megatron; else where it is."""
    lines = (source_of(path) or "").splitlines()
    if code in "".join(lines[number - 1 : number]):
        return None
    now = [str(other) for other, line in enumerate(lines, 1) if code in line]
    return f"{path}:{number} is not {code!r}: " + (f"it is on line {', '.join(now)}" if now else "it is gone")


def test_the_table_cites_what_is_held_here_and_nothing_else() -> None:
    held = {f"{path}:{number}" for path, numbers, _ in CITED for number in numbers if number is not None}
    assert cited_by((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")) == held


@pytest.mark.parametrize(("path", "numbers", "code"), CITED)
def test_every_cited_line_stands_where_it_is_said_to(
    path: str, numbers: tuple[int | None, int | None], code: str
) -> None:
    """Where one has moved, put Megatron's module in the place of ours once more: its row may be out of date."""
    installed = megatron_version()
    assert installed in MEGATRON_VERSIONS, f"the table knows {' and '.join(MEGATRON_VERSIONS)}, and not {installed}"
    number = numbers[MEGATRON_VERSIONS.index(installed)]
    assert number is None or moved(path, number, code) is None


def test_a_moved_line_is_found() -> None:
    path, numbers, code = "utils.py", (1205, 1330), "l2 = [[(torch.norm(tensor))"
    number = numbers[MEGATRON_VERSIONS.index(megatron_version())]
    assert f"it is on line {number}" in str(moved(path, number - 1, code))
    assert "it is gone" in str(moved(path, number, "no such code"))
