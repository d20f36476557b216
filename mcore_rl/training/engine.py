"""One role's model on this rank: scores tokens, trains on losses, keeps snapshots, moves to host memory and back.

Every public method is collective over the world: all ranks call it in the same order.  A batch holds the sequences
of one data-parallel coordinate; its tensor, pipeline and context peers pass the same batch.  The engine knows no
algorithm and reads no file.  Its invariant: no result depends on layout, microbatches, recompute or dispatcher
(tests/invariance).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mcore_rl.config.algorithm import DistillConfig
from mcore_rl.config.engine import (
    AuxLoss,
    Dispatcher,
    EngineConfig,
    LayerSpec,
    Precision,
    SharePrompts,
    engine_violations,
    muon_problem,
    why_not_shared,
)
from mcore_rl.config.megatron_fields import megatron_violations
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.model_violations import model_violations
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.ground.errors import NonFiniteError, Violation, refuse_if_any
from mcore_rl.ground.types import Denominators, LossInputs, LossSums, StepResult, TokenScores, TrainBatch
from mcore_rl.parallel.device import Platform, pinned_empty_like
from mcore_rl.parallel.groups import ProcessGroups, sum_over
from mcore_rl.parallel.layout import describe_placement, layout_violations
from mcore_rl.parallel.phase import phase
from mcore_rl.parallel.weight_gradient import take_apexs_place
from mcore_rl.training.adapters import attach, start, sum_expert_replicas
from mcore_rl.training.distillation import Teacher
from mcore_rl.training.full_kl import full_kl
from mcore_rl.training.fusions import resolve_fusions, share_buffers
from mcore_rl.training.layers import resolve_layer_spec, transformer_engine_problem
from mcore_rl.training.logprobs import cache_sized_chunk_bytes, token_logprobs
from mcore_rl.training.microbatch import NOWHERE, Microbatch, build_microbatches, rows_per_context_rank
from mcore_rl.training.model import DTYPES, build_chunks, transformer_config
from mcore_rl.training.nonfinite import FiniteWatch
from mcore_rl.training.offload import Offload, OffloadPart
from mcore_rl.training.optimizer import Optimizer
from mcore_rl.training.pictures import see_pictures
from mcore_rl.training.router import Purpose
from mcore_rl.training.routing import Routing
from mcore_rl.training.schedule import run_schedule
from mcore_rl.training.snapshots import Snapshots
from mcore_rl.training.step_outputs import HiddenOutputs, RunningSums, TokenOutputs, keep_scores
from mcore_rl.weights.adapter_table import AdapterTable

logger = logging.getLogger(__name__)

Loss = Callable[[LossInputs], LossSums]
SAVED_TOKENS = "saved_tokens"  # among a step's sums; see ``StepResult``
BUCKET_ELEMENTS: int | None = None  # of ``overlap_grad_reduce``; None is Megatron's, planning/states.py has its rule


class Engine:
    """The model of one role on this rank.

    head: a value head gives values instead of log-probs; without an output projection the engine gives
    ``hidden_states`` alone.  trainable: with gradients and an optimizer.
    adapters: train these tensors and freeze all others; None trains all.
    train_tower: False freezes the vision tower of a model that sees pictures.
    Raises ConfigError with every violation of model, layout, engine and optimizer settings at once.
    """

    def __init__(
        self,
        role: str,
        model: ModelConfig,
        parallel: ParallelConfig,
        config: EngineConfig,
        groups: ProcessGroups,
        platform: Platform,
        *,
        head: Head = Head.lm,
        trainable: bool = True,
        adapters: AdapterTable | None = None,
        train_tower: bool = True,
    ) -> None:
        why_local = transformer_engine_problem(model, parallel, config.precision, platform)
        why_local = why_local or muon_problem(config.optim.optimizer)
        layer_spec, spec_violations = resolve_layer_spec(config.layer_spec, why_local)
        violations = [*model_violations(model), *engine_violations(config), *spec_violations]
        if config.precision is Precision.bfloat16 and not platform.supports_bf16:
            problem = f"{platform.device_name} cannot compute in it"
            violations.append(Violation("precision", config.precision.value, problem, "Write precision=float32"))
        if model.vision is not None and config.microbatch_sequences is not None:
            problem = "leaves sequences with pictures unpacked"
            remedy = "Write microbatch_tokens"
            violations.append(Violation("microbatch_sequences", config.microbatch_sequences, problem, remedy))
        fusions, unfit = resolve_fusions(config, model, groups.layout, platform, layer_spec)
        violations += [*unfit, *megatron_violations(config.megatron)]
        refuse_if_any([*violations, *layout_violations(model, parallel, groups.layout.world_size)])
        self.role = role
        self.model = model
        self.config = config
        self.groups = groups
        self.platform = platform
        self.head = head
        self.layer_spec = layer_spec
        self.dtype = DTYPES[config.precision]
        self.fills_microbatches = fusions.tp_comm_overlap
        transformer_engine = layer_spec is LayerSpec.transformer_engine
        not_shared = why_not_shared(config, model, parallel, transformer_engine=transformer_engine)
        self.shares_prompts = not_shared is None
        with phase("build", role=role):
            if fusions.gradient_accumulation_fusion:
                take_apexs_place()
            settings = transformer_config(model, parallel, config, layer_spec, fusions)
            if fusions.tp_comm_overlap:
                share_buffers(rows_per_context_rank(config.microbatch_tokens, groups), model, groups.layout, platform)
            train_tower = train_tower and trainable and adapters is None
            self.models = build_chunks(
                model, settings, parallel, layer_spec, groups, head=head, train_tower=train_tower
            )
            if adapters is not None:
                attach(self.models, adapters, groups)
                start(self.models, adapters, groups.rank, config.seed)
            # Behind the hook of adapters: features are let go when a gradient comes back to the embeddings.
            self.pictures = see_pictures(self.models, model, groups)
            self.chunks: list[DistributedDataParallel] = []
            self.optimizer: Optimizer | None = None
            if trainable:
                self.chunks = self._wrap(settings, overlap=fusions.overlap_grad_reduce)
                main = self.dtype if adapters is None else torch.float32  # adapters are their own main weights
                self.optimizer = Optimizer(config.optim, self.chunks, main)
        self.snapshots = Snapshots(self.models, platform)
        self.memory = Offload(self.models, self.chunks, self.optimizer, platform)
        self.routing: Routing | None = None
        if model.moe is not None:
            self.routing = Routing(self.models, model.num_layers, model.moe, config.moe, groups)
        self._watch = FiniteWatch(groups, self.models, parallel.pp * parallel.vpp)
        self.teacher: Teacher | None = None  # one or several, on the last stage of a policy distilled in its loss
        self.num_skipped = 0
        self._skipped_in_a_row: list[str] = []
        if groups.rank == 0 and platform.is_accelerator and config.layer_spec is LayerSpec.auto and why_local:
            logger.info("%s: local layers instead of Transformer Engine's: %s", role, why_local)
        if groups.rank == 0 and config.share_prompts is not SharePrompts.off and not_shared is not None:
            logger.info("%s: prompts are not shared: %s", role, not_shared)
        if groups.rank == 0 and parallel.pp > 1:
            logger.info("%s\n%s", role, describe_placement(model.num_layers, parallel))

    def _wrap(self, settings: TransformerConfig, *, overlap: bool) -> list[DistributedDataParallel]:
        # Gradients are summed in float32 and scattered to the optimizer's shards once: after the last microbatch, or
        # with ``overlap`` a bucket at a time in its backward pass.
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap,
            bucket_size=BUCKET_ELEMENTS,
        )
        # Of several chunks the first alone is cut, as in Megatron's own training: it is the last to be reduced.
        whole = [overlap and index > 0 for index in range(len(self.models))]
        wrapped = [DistributedDataParallel(settings, ddp, *each) for each in zip(self.models, whole, strict=True)]
        if overlap:
            quiet = [chunk.no_sync for chunk in wrapped]  # during all microbatches but the last
            settings.no_sync_func = quiet if len(quiet) > 1 else quiet[0]
        # Megatron passes a token count to divide by; our losses are divided already.
        settings.finalize_model_grads_func = self._finalize
        return wrapped

    def _finalize(self, chunks: list[DistributedDataParallel], num_tokens: object, **kwargs: Any) -> None:
        finalize_model_grads(chunks, **kwargs)
        sum_expert_replicas(chunks, self.groups)

    def load_weights(self, load: Callable[[Sequence[torch.nn.Module]], None]) -> None:
        """Let ``load`` write this rank's weights in place, then update the optimizer's main weights from them."""
        self.memory.require(OffloadPart.weights, OffloadPart.optimizer)
        assert self.snapshots.swapped_in is None, "weights loaded over a snapshot in place would be lost with it"
        with phase("load_weights", role=self.role), torch.no_grad():
            load(self.models)
            if self.optimizer is not None:
                self.optimizer.megatron.reload_model_params()

    def score(
        self,
        batch: TrainBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = True,
        record_routing: bool = False,
        snapshot: str | None = None,
    ) -> TokenScores:
        """Log-probs and entropy of every token (values, of a value head), without gradient; the same on every peer.

        temperature: of the distribution the tokens were sampled from.  record_routing: also return the experts chosen.
        snapshot: score with these weights instead of the live ones.  A ``batch.routing_TLK`` is replayed, but where
        ``batch.unrouted_T`` is set.
        """
        self.memory.require(OffloadPart.weights)
        batch = batch.to(self.groups.device)
        out = TokenOutputs(self.head, with_entropy, batch.tokens_T.numel(), self.groups)

        def keep(microbatch: Microbatch, output: Tensor) -> None:
            if self.head is Head.value:
                values = [output.float().view(-1)]
            else:
                scores = self._logprobs(microbatch, output.view(-1, output.shape[-1]), temperature, with_entropy)
                values = [score_N for score_N in scores if score_N is not None]
            out.add(microbatch, values)

        with phase("score", role=self.role), torch.no_grad():
            microbatches = self._microbatches(batch)
            self._forward(batch, microbatches, keep, snapshot, record_routing=record_routing)
            scored = out.over_ranks()
            routing_TLK = None
            if record_routing and self.routing is not None:
                routing_TLK = self.routing.choices(microbatches, batch.tokens_T.numel())
        return replace(scored, routing_TLK=routing_TLK)

    def hidden_states(self, batch: TrainBatch, *, snapshot: str | None = None) -> Tensor:
        """The last hidden states that predict the trained tokens, [M, H], in the model's dtype, on the CPU.

        In the order of the batch; the same on every peer.  snapshot: as in ``score``.
        """
        self.memory.require(OffloadPart.weights)
        out = HiddenOutputs(batch.mask_T, self.model.hidden_size, self.dtype, self.groups)
        batch = batch.to(self.groups.device)
        with phase("score", role=self.role):
            self._forward(batch, self._microbatches(batch), out.add, snapshot)
            return out.over_ranks()

    def train_step(
        self,
        batch: TrainBatch,
        loss: Loss,
        denominators: Denominators,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        kl_to: str | None = None,
        distill: DistillConfig | None = None,
        with_scores: bool = False,
    ) -> StepResult:
        """One optimizer step on one minibatch.  ``loss`` returns sums; ``denominators`` count the global minibatch.

        with_entropy: give the loss entropies (they cost time).  kl_to: give it the exact KL to the policy of this
        snapshot, which costs a forward pass and host memory for the snapshot's logits at the trained tokens.  distill:
        give it the divergence from the ``teacher``, whose hidden states ``batch`` has.  A ``batch.routing_TLK`` is
        replayed, recomputation included, but not in the snapshot's pass.
        with_scores: also return what ``score`` says of ``batch`` before the step, entropies included, from the step's
        own forward pass; if ``batch`` has no old log-probs, the loss gets these.
        A non-finite loss or gradient skips a step; ``max_nonfinite_steps`` in a row raise NonFiniteError on all ranks.
        """
        assert self.optimizer is not None, f"the {self.role} was built to score only"
        assert self.snapshots.swapped_in is None, "a step on swapped-in weights would train the wrong model"
        assert denominators.loss > 0, "nothing is trained: the loss would be divided by 0"
        self.memory.require(*OffloadPart, arriving=[OffloadPart.optimizer])
        batch = batch.to(self.groups.device)
        sums = RunningSums(self.groups)
        out = TokenOutputs(self.head, True, batch.tokens_T.numel(), self.groups) if with_scores else None

        def differentiate(microbatch: Microbatch, output: Tensor) -> Tensor:
            # One view for all terms of the loss: autograd adds up gradients of one tensor in place, not those of two.
            index = microbatch.index
            logits_NV = output.view(-1, output.shape[-1])
            inputs = self._loss_inputs(batch, microbatch, logits_NV, temperature, with_entropy or with_scores)
            if out is not None:
                inputs = keep_scores(out, microbatch, inputs, with_entropy=with_entropy)
            if kept is not None:
                kl_N = full_kl(logits_NV, kept[index], inputs.mask_N, temperature=temperature, **self._vocabulary)
                inputs = replace(inputs, full_kl_N=kl_N)
            if teacher is not None:
                from_teacher_N = teacher.divergence(index, logits_NV, temperature, self._vocabulary)
                inputs = replace(inputs, divergence_N=from_teacher_N)
            loss_sums = loss(inputs)
            total = loss_sums.total / denominators.loss
            self._watch.loss(total, index)
            if self.shares_prompts:  # on every rank, as all sums are
                saved = 0 if microbatch.shared is None else microbatch.shared.saved
                told = {SAVED_TOKENS: torch.tensor(float(saved), device=self.groups.device)}
                loss_sums = replace(loss_sums, metrics=loss_sums.metrics | told)
            sums.add(total, loss_sums)
            return total

        with phase("train_step", role=self.role):
            microbatches = self._microbatches(batch)
            kept = None if kl_to is None else self._logits_of(kl_to, batch, microbatches)
            teacher = None
            if distill is not None and self.teacher is not None:  # on the last stage
                teacher = self.teacher.for_step(batch, microbatches, distill, self.groups.device)
            self.optimizer.megatron.zero_grad()
            self._begin_step(batch, microbatches, denominators)
            self._run(self.chunks, microbatches, differentiate, forward_only=False)
            self._watch.end()
            loss_value, metrics, maxima = sums.over_ranks()
            saved_tokens = int(metrics.pop(SAVED_TOKENS, 0))
            scores = None if out is None else out.over_ranks()
            with phase("optimizer"):
                self.memory.require(OffloadPart.optimizer)
                lr = self.optimizer.lr
                stepped = self.optimizer.step(loss_is_finite=math.isfinite(loss_value))
            if self.routing is not None:
                metrics |= self.routing.metrics(denominators)
            skipped = self._note_outcome(stepped.grad_norm, stepped.finite)
        return StepResult(
            loss=loss_value,
            grad_norm=stepped.grad_norm,
            lr=lr,
            skipped=skipped,
            metrics=metrics,
            maxima=maxima,
            saved_tokens=saved_tokens,
            scores=scores,
        )

    def _count_choices(self, batch: TrainBatch, microbatches: list[Microbatch]) -> None:
        """Run a forward-only pass in which the routers count the choices of the whole global batch."""
        assert self.routing is not None
        self.routing.begin(Purpose.count, batch)
        with phase("count_choices"), torch.no_grad():
            zero = torch.zeros((), device=self.groups.device)
            self._run(self.models, microbatches, lambda *_: zero, forward_only=True)
        self.routing.keep_batch_counts()

    def _begin_step(self, batch: TrainBatch, microbatches: list[Microbatch], denominators: Denominators) -> None:
        """Makes modules, their gradients and their routers ready for the passes of a step."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        if self.routing is not None:
            if self.config.moe.aux_loss is AuxLoss.batch:
                self._count_choices(batch, microbatches)
            self.routing.begin(Purpose.train, batch, denominators=denominators)
        self._watch.begin()

    def _note_outcome(self, grad_norm: float, finite: bool) -> str | None:
        if finite:
            self._skipped_in_a_row.clear()
            return None
        reason = f"{self.role}: non-finite {self._watch.explain()}; the gradient norm is {grad_norm}"
        self.num_skipped += 1
        self._skipped_in_a_row.append(reason)
        if self.groups.rank == 0:
            logger.warning("step skipped, weights unchanged (%d so far): %s", self.num_skipped, reason)
        if len(self._skipped_in_a_row) >= self.config.max_nonfinite_steps:
            history = "\n".join(f"  - {reason}" for reason in self._skipped_in_a_row)
            raise NonFiniteError(
                f"{len(self._skipped_in_a_row)} steps in a row were skipped:\n{history}\n"
                "The weights are those of the last good step. Lower the learning rate or the clip range, or look at "
                "the data of the microbatches named above; max_nonfinite_steps sets how many in a row are accepted."
            )
        return reason

    def _forward(
        self,
        batch: TrainBatch,
        microbatches: list[Microbatch],
        on_output: Callable[[Microbatch, Tensor], None],
        snapshot: str | None,
        *,
        record_routing: bool = False,
        replay: bool = True,
    ) -> None:
        """Run all microbatches through the model, without gradient."""

        def finish(microbatch: Microbatch, output: Tensor) -> Tensor:
            on_output(microbatch, output)
            return torch.zeros((), device=self.groups.device)

        weights = nullcontext() if snapshot is None else self.snapshots.swapped(snapshot)
        with torch.no_grad(), weights:
            for model in self.models:
                model.eval()
            if self.routing is not None:
                self.routing.begin(Purpose.score, batch, record=record_routing, replay=replay)
            self._run(self.models, microbatches, finish, forward_only=True)

    def _run(
        self,
        chunks: Sequence[torch.nn.Module],
        microbatches: list[Microbatch],
        on_output: Callable[[Microbatch, Tensor], Tensor],
        *,
        forward_only: bool,
    ) -> None:
        run_schedule(chunks, microbatches, self._announce, on_output, forward_only=forward_only)
        if self.pictures is not None:
            self.pictures.forget()

    def _logits_of(self, snapshot: str, batch: TrainBatch, microbatches: list[Microbatch]) -> dict[int, Tensor]:
        """Logits at the trained rows of each microbatch, [M, V_local], in host memory; empty before the last stage."""
        kept: dict[int, Tensor] = {}

        def keep(microbatch: Microbatch, output: Tensor) -> None:
            mask_N = microbatch.at_targets(batch.mask_T)
            logits_MV = output.view(-1, output.shape[-1])[mask_N]
            kept[microbatch.index] = pinned_empty_like(self.platform, logits_MV).copy_(logits_MV)

        with phase("reference"):
            self._forward(batch, microbatches, keep, snapshot, replay=False)
        return kept

    def _microbatches(self, batch: TrainBatch) -> list[Microbatch]:
        if batch.images_S is not None:
            assert self.model.vision is not None, "pictures, of which the model sees none"
            assert self.model.mrope is None or batch.positions_T3 is not None, "pictures without their positions"
        if self.pictures is not None:
            batch.demand_patches()
        with phase("microbatches"):
            gathers_experts = self.config.moe.dispatcher is Dispatcher.allgather
            return build_microbatches(
                batch,
                self.groups,
                tokens=self.config.microbatch_tokens,
                sequences=self.config.microbatch_sequences,
                equal_over_experts=gathers_experts and self.groups.experts.size() > 1,
                fill=self.fills_microbatches,
                share_prompts=self.shares_prompts and batch.pairs_S is None,
                patches=self.config.microbatch_patches,
            )

    def _announce(self, microbatch: Microbatch) -> None:
        self._watch.microbatch = microbatch.index
        if self.pictures is not None:
            self.pictures.announce(microbatch)
        if self.routing is not None:
            self.routing.announce(microbatch)

    def _logprobs(
        self, microbatch: Microbatch, logits_NV: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropy, each [N]; rows that predict nothing hold arbitrary numbers."""
        return token_logprobs(
            logits_NV,
            microbatch.labels_N,
            temperature=temperature,
            with_entropy=with_entropy,
            skips_untrained=not self.platform.is_accelerator,
            **self._vocabulary,
        )

    @property
    def _vocabulary(self) -> dict[str, Any]:
        """The arguments that ``token_logprobs``, ``full_kl`` and ``divergence`` share."""
        return {
            "vocab_size": self.model.vocab_size,
            "soft_cap": self.model.output_soft_cap,
            "group": self.groups.tp,
            "chunk_bytes": cache_sized_chunk_bytes(self.platform),
        }

    def _loss_inputs(
        self, batch: TrainBatch, microbatch: Microbatch, output_NV: Tensor, temperature: float, with_entropy: bool
    ) -> LossInputs:
        """What this forward pass made of the microbatch's rows, and the batch's fields at the tokens they predict."""
        nothing_N = microbatch.targets_N == NOWHERE
        logprobs_N = entropy_N = values_N = None
        if self.head is Head.value:
            values_N = output_NV.float().view(-1).masked_fill(nothing_N, 0)
        else:
            logprobs_N, entropy_N = self._logprobs(microbatch, output_NV, temperature, with_entropy)
            logprobs_N = logprobs_N.masked_fill(nothing_N, 0)
            entropy_N = None if entropy_N is None else entropy_N.masked_fill(nothing_N, 0)
        at_targets = microbatch.at_targets
        mask_N = at_targets(batch.mask_T)
        assert mask_N is not None
        return LossInputs(
            mask_N=mask_N,
            sequence_N=microbatch.sequence_N,
            num_sequences=len(microbatch.lengths),
            sum_over_context=lambda x: sum_over(x, self.groups.cp),
            logprobs_N=logprobs_N,
            entropy_N=entropy_N,
            values_N=values_N,
            old_logprobs_N=at_targets(batch.old_logprobs_T),
            ref_logprobs_N=at_targets(batch.ref_logprobs_T),
            rollout_logprobs_N=at_targets(batch.rollout_logprobs_T),
            advantages_N=at_targets(batch.advantages_T),
            returns_N=at_targets(batch.returns_T),
            old_values_N=at_targets(batch.old_values_T),
            weights_N=at_targets(batch.weights_T),
            selection_N=at_targets(batch.selection_T),
            extra_N=microbatch.extra_at_targets(batch.extra_T),
            extra_S=microbatch.extra_of_sequences(batch.extra_S),
            pairs_P2=microbatch.pairs(batch.pairs_S),
        )
