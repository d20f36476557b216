"""Kernels by kind, on names that torch and the vendors' libraries give them, and the share of time that is busy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from benchmarks.gpu_sections.profile import KINDS, OTHER, Run, busy_us, kind_of, of_runs, runs_of

# As torch's CUDA build (2.13), cuBLAS, CUTLASS, NCCL, Transformer Engine, Triton and AMD's libraries call them, or the
# beginning of it.
NAMES = {
    "communication": (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "gloo:all_reduce",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4, false, false, "
        "cutlass::bfloat16_t, Flash_kernel_traits<64, 128, 64, 4, cutlass::bfloat16_t> >, false>(Flash_fwd_params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x128_4x1x1_kernel0_0",
        "attn_fwd.kd",
        "bwd_kernel_dk_dv",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
        "(at::native::(anonymous namespace)::ADAM_MODE)1, false>, float const*, double>",
        "aten::_fused_adamw_",
    ),
    "matmul": (
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<int>>>",
        "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t, cutlass::bfloat16_t>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1_AFC1",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
    ),
    "norm": (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>",
        "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float, true>",
        "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<transformer_engine::normalization::Traits>",
        "aten::_fused_rms_norm",
    ),
    "rope": (
        "void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>(__nv_bfloat16 const*, int const*, float*)",
    ),
    "softmax and loss": (
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*, int)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
        "_gradient_kernel",
        "_sum_kernel",
    ),
    "compiled (torch.compile)": ("triton_poi_fused__to_copy_mul_silu_2", "triton_red_fused_cat_sum_1"),
    "indexing and sorting": (
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2>",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel>",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::DeviceRadixSortPolicy>",
        "void at::native::(anonymous namespace)::flag_kernel<512, 16, bool>(bool const*, long*, long const*)",
        "void at::native::tensor_kernel_scan_innermost_dim<long, std::plus<long> >(long*, long const*, unsigned int)",
        "void at::native::(anonymous namespace)::compute_grad_weight<c10::BFloat16, long>(long const*)",
        "aten::index_select",
    ),
    "copy": (
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
        "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<OpaqueType<2u>, 2, 128>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>",
    ),
    "elementwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
        "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<"
        "c10::BFloat16, c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> > >",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>",
        "aten::mul",
    ),
    OTHER: ("spin_kernel", "autograd::engine::evaluate_function: MeanBackward0"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_a_kernel_is_of_its_kind(kind: str, name: str) -> None:
    assert kind_of(name) == kind


def test_every_kind_has_names() -> None:
    assert {*NAMES} == {kind for kind, _ in KINDS} | {OTHER}


def test_time_in_which_two_run_counts_once() -> None:
    runs = [Run("a", 0, 10, 10), Run("b", 5, 20, 15), Run("c", 6, 8, 2), Run("d", 30, 31, 1)]
    assert busy_us(reversed(runs)) == 21
    assert busy_us([]) == 0


def event(name: str, device: DeviceType, begin: float, end: float, **changes: object) -> SimpleNamespace:
    plain = dict(is_user_annotation=False, self_cpu_time_total=end - begin)
    return SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(start=begin, end=end), **(plain | changes)
    )


def test_kernels_are_counted_without_the_profilers_own_marks() -> None:
    events = [
        event("aten::mm", DeviceType.CPU, 0, 4, self_cpu_time_total=1),
        event("nvjet_hsh_128x256", DeviceType.CUDA, 10, 40),
        event("Memset (Device)", DeviceType.CUDA, 40, 45),
        event("forward, microbatch 0", DeviceType.CUDA, 10, 45, is_user_annotation=True),
    ]
    assert [run.name for run in runs_of(events, on_device=True)] == ["nvjet_hsh_128x256", "Memset (Device)"]  # type: ignore[arg-type]
    assert runs_of(events, on_device=False) == [Run("aten::mm", 0, 4, 1)]  # type: ignore[arg-type]
    whole, *kinds = of_runs("case", runs_of(events, on_device=True), wall_s=70e-6, plain_s=60e-6)  # type: ignore[arg-type]
    assert whole.value == pytest.approx(50.0) and whole.ok
    assert [(fact.what, fact.value) for fact in kinds] == [("case: matmul", 0.03), ("case: copy", 0.005)]
    assert "85.7 %, 1 runs; most in nvjet" in kinds[0].beside
