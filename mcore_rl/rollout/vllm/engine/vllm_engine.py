"""The rollout engine on vLLM's AsyncLLM, in a process that belongs to vLLM: the child of ``process.py``.

vLLM resets the seed of torch, its threads and its process groups, so this is never imported beside Megatron.  Each
sample of a prompt is a request with its own seed; vLLM still shares the prompt's full KV blocks among them.

The invariant: a sample depends only on the weights, its prompt, its index, the sampling and the run's seed, not on the
requests that run beside it, as far as the platform's kernels round alike in every batch.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import mm_input, tokens_input
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.outputs import RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from mcore_rl.config.lora import EngineAdapters
from mcore_rl.ground.errors import RolloutError, WeightsIncompleteError
from mcore_rl.parallel.launch import inherited_environment
from mcore_rl.rollout.episodes import FinishReason, VersionSpan
from mcore_rl.rollout.protocol import (
    EngineMemory,
    Pause,
    PromptPicture,
    Request,
    Sample,
    Sampling,
    Statistics,
    demand_numbers,
    seed_of,
)
from mcore_rl.rollout.routes import continued
from mcore_rl.rollout.vllm.engine import picture_models
from mcore_rl.rollout.vllm.engine.borders import mended
from mcore_rl.rollout.vllm.engine.environment import Settings, picture_folder
from mcore_rl.rollout.vllm.engine.liveness import Liveness, start_error, stop_s
from mcore_rl.rollout.vllm.engine.patch_files import PatchFiles, name_of, named
from mcore_rl.rollout.vllm.engine.request_checks import Limits, demand_requests, limits_of

P = ParamSpec("P")
T = TypeVar("T")


class VllmEngine:
    """A ``RolloutEngine``; ``start`` makes it."""

    def __init__(
        self,
        llm: AsyncLLM,
        meter: Meter,
        limits: Limits,
        log: Path | None,
        stop_s: float,
        refusal: str = "",
        lora: LoRARequest | None = None,
        pictures: Path | None = None,
    ) -> None:
        self._llm = llm
        self._meter = meter
        self._limits = limits
        self._stop_s = stop_s
        cores = llm.engine_core.resources.engine_manager.processes
        self._liveness = Liveness(limits.name, log, cores, lambda: llm.errored)
        self._alive = self._liveness.alive
        self._ids: dict[str, tuple[str, int]] = {}  # vLLM's id of a request -> the request's key
        self._count = itertools.count()
        self._refusal = refusal
        self._lora = lora
        self._files = None if pictures is None else PatchFiles(pictures)

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return self._limits.name

    @classmethod
    async def start(cls, settings: Settings) -> VllmEngine:
        """Loads ``settings.directory`` into vLLM, in processes of vLLM's own; takes 10 s or more.

        This process must have been started with ``engine_environment``.
        Raises RolloutError with the first cause if vLLM does not start.
        """
        directory = settings.directory
        model = settings.model
        arguments = settings.arguments
        try:
            picture_models.use(directory, pictures=model.vision is not None)
            vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
            # On CPU vLLM has just asked for fresh processes, since those of several ranks bind their threads by
            # variables that OpenMP reads when it is loaded.  One rank has none to bind, and this process has only
            # imported: a fork of it spares a second import of vLLM, 5 s.
            forks = not settings.platform.is_accelerator and settings.config.tp == 1
            executor = picture_models.executor_of(vllm_config)
            with inherited_environment({"VLLM_WORKER_MULTIPROC_METHOD": "fork"} if forks else {}):
                llm = AsyncLLM(vllm_config, executor, log_stats=False, log_requests=False, stat_loggers=[Meter])
            await llm.update_weight_version(str(settings.version))
        except Exception as error:  # vLLM passes on any exception of its models, checks and processes
            raise start_error(settings.name, directory, settings.log, error) from error
        (meter,) = llm.logger_manager.stat_loggers
        refusal = "it was started without weights" if settings.awaits_weights else ""
        limits = limits_of(settings.name, directory, settings.config, model)
        folder = None if model.vision is None or settings.node.nnodes > 1 else picture_folder()
        lora = _lora_request(settings.adapters)
        return cls(llm, meter, limits, settings.log, stop_s(settings.platform), refusal, lora, folder)

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Sample]:
        """See ``RolloutEngine.generate``."""
        self._demand_whole_weights()
        demand_requests(requests, sampling, self._limits)
        pictures = {id(each): each for request in requests for each in request.prompt.pictures}
        items = {key: picture_item(each, by_name=self._files is not None) for key, each in pictures.items()}
        names = [] if self._files is None else self._files.open(list(pictures.values()))
        finished: asyncio.Queue[Sample | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self._generate_one(request, items, sampling, finished)) for request in requests]
        num_ended = 0  # by themselves
        try:
            for unfinished in range(len(tasks), 0, -1):
                sample = await self._alive(finished.get(), f"generating {unfinished} samples")
                if isinstance(sample, Exception):
                    raise await self._liveness.explained(sample, f"generating {unfinished} samples")
                num_ended += sample.finish is not FinishReason.abort
                yield sample
        finally:
            await _cancel(tasks)
            if self._files is not None:
                self._files.close(names, is_finished=num_ended == len(tasks))

    async def classify(self, texts: Sequence[Sequence[int]]) -> list[float | str]:
        """See ``RolloutEngine.classify``."""
        return await self._alive(self._classify(texts), f"scoring {len(texts)} texts")

    async def abort(self, keys: Iterable[tuple[str, int]] | None = None) -> None:
        """See ``RolloutEngine.abort``."""
        wanted = set(self._ids.values()) if keys is None else set(keys)
        ids = [vllm_id for vllm_id, key in self._ids.items() if key in wanted]
        await self._alive(self._llm.abort(ids), f"aborting {len(ids)} samples")

    async def pause(self, mode: Pause) -> None:
        """See ``RolloutEngine.pause``."""
        await self._alive(self._llm.pause_generation(mode=mode.value), f"pausing ({mode.value})")

    async def resume(self) -> None:
        """See ``RolloutEngine.resume``."""
        self._demand_whole_weights()
        await self._alive(self._llm.resume_generation(), "resuming")

    async def sleep(self, level: int = 1) -> None:
        """See ``RolloutEngine.sleep``."""
        await self._alive(self._llm.sleep(level), f"going to sleep at level {level}")

    async def wake(self, memory: EngineMemory | None = None) -> None:
        """See ``RolloutEngine.wake``."""
        tags = None if memory is None else [memory.value]
        await self._alive(self._llm.wake_up(tags), "waking up")

    async def version(self) -> int:
        """See ``RolloutEngine.version``."""
        return int(await self._alive(self._llm.get_weight_version(), "asked for its version"))

    async def start_update(self, mode: Pause = Pause.keep) -> None:
        """See ``RolloutEngine.start_update``."""
        self._refusal = "its weights are being updated"
        await self.pause(mode)

    async def finish_update(self, version: int) -> None:
        """See ``RolloutEngine.finish_update``."""
        await self._alive(self._llm.update_weight_version(str(version)), f"finishing the update to version {version}")
        await self._reset_prefix_cache()
        if self._limits.tower is not None:
            await self._alive(self._llm.reset_encoder_cache(), "forgetting the features of pictures")
        if self._files is not None:
            self._files.clear()
        self._refusal = ""
        await self.resume()

    async def fail_update(self, cause: str) -> None:
        """See ``RolloutEngine.fail_update``."""
        self._refusal = f"an update of its weights failed ({cause})"
        await self.abort()

    async def call_workers(
        self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **options: P.kwargs
    ) -> list[T]:
        """See ``RolloutEngine.call_workers``."""
        name = method.__name__
        results: list[T] = await self._alive(
            self._llm.collective_rpc(name, args=args, kwargs=options), f"running {name}"
        )
        return results

    async def watch(self) -> None:
        """See ``EnginePart.watch``."""
        await self._liveness.watch()

    async def statistics(self) -> Statistics:
        """See ``RolloutEngine.statistics``."""
        return self._meter.statistics()

    async def shutdown(self) -> None:
        """See ``RolloutEngine.shutdown``."""
        await self._liveness.close()
        await asyncio.to_thread(self._llm.shutdown, self._stop_s)
        self._liveness.clear()

    async def _reset_prefix_cache(self) -> None:
        """Drops every cached prefix; vLLM computes running samples again from their tokens."""
        reset = self._llm.reset_prefix_cache(reset_running_requests=True)
        if not await self._alive(reset, "resetting its prefix cache"):
            raise RolloutError(f"{self.name}: vLLM did not reset its prefix cache: some of it is in use")

    def _demand_whole_weights(self) -> None:
        if self._refusal:
            remedy = "Send all weights again and finish the update"
            raise WeightsIncompleteError(f"{self.name} does not generate: {self._refusal}. {remedy}")

    async def _generate_one(
        self,
        request: Request,
        items: Mapping[int, MultiModalKwargsItem],
        sampling: Sampling,
        finished: asyncio.Queue[Sample | Exception],
    ) -> None:
        vllm_id = str(next(self._count))
        self._ids[vllm_id] = request.key
        try:
            params = sampling_params(request, sampling, detokenize=self._limits.has_tokenizer)
            async with aclosing(
                self._llm.generate(engine_input(request, items), params, vllm_id, lora_request=self._lora)
            ) as outputs:
                async for output in outputs:  # one, when it is finished
                    assert isinstance(output, RequestOutput)
                    sample = sample_of(request, output)
                    if self._limits.has_tokenizer:
                        sample = mended(request, sample, sampling.stop, self._decode)
                    finished.put_nowait(sample)
        except Exception as error:  # noqa: BLE001  raised where the samples are read
            finished.put_nowait(error)
        finally:
            del self._ids[vllm_id]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._llm.get_tokenizer().decode(tokens, skip_special_tokens=True))

    async def _classify(self, texts: Sequence[Sequence[int]]) -> list[float | str]:
        return list(await asyncio.gather(*map(self._classify_one, texts)))

    async def _classify_one(self, tokens: Sequence[int]) -> float | str:
        tasks = await self._llm.get_supported_tasks()
        # A head of the model's own (Qwen2ForRewardModel) gives a number at every token.
        params = PoolingParams(task="classify" if "classify" in tasks else "token_classify")
        outputs = self._llm.encode(tokens_input(list(tokens)), params, str(next(self._count)))
        async with aclosing(outputs):
            async for output in outputs:
                if output.error is not None:
                    return str(output.error.message)
                return float(output.outputs.data.flatten()[-1])
        return "vLLM ended without an answer"


def _lora_request(adapters: EngineAdapters | None) -> LoRARequest | None:
    """The adapters that every sample is drawn with.  vLLM reads no file: an update has written them before."""
    if adapters is None:
        return None
    (adapter,) = adapters.ids
    return LoRARequest(lora_name="actor", lora_int_id=adapter, lora_path="sent by the trainer")


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Meter(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is not followed
    """One of vLLM's stat loggers, for all ranks of an engine.

    It is a subclass of PrometheusStatLogger in name only: vLLM would add a real one, which costs more than this
    counting, unless the list has one (StatLoggerManager in vllm/v1/metrics/loggers.py, 0.32).
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:  # not super's: no Prometheus
        self._running: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._usage: dict[int, float] = {}
        self._prompt = self._cached = self._generated = self._preemptions = 0
        self._busy_s = 0.0
        self._seen_s = time.monotonic()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Adds the scheduler's report of one step."""
        now = time.monotonic()
        if any(self._running.values()):
            self._busy_s += now - self._seen_s
        self._seen_s = now
        if scheduler_stats is not None:
            self._running[engine_idx] = scheduler_stats.num_running_reqs
            self._waiting[engine_idx] = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._usage[engine_idx] = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            tokens = iteration_stats.prompt_token_stats
            self._prompt += tokens.total
            self._cached += tokens.local_cache_hit
            self._generated += iteration_stats.num_generation_tokens
            self._preemptions += iteration_stats.num_preempted_reqs

    def statistics(self) -> Statistics:
        """The counts so far, and the state after the last step."""
        return Statistics(
            running=sum(self._running.values()),
            waiting=sum(self._waiting.values()),
            kv_cache_usage=max(self._usage.values(), default=0.0),
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            generated_tokens=self._generated,
            preemptions=self._preemptions,
            busy_s=self._busy_s,
        )

    def log(self) -> None:
        """Does nothing: callers use ``statistics`` instead."""

    def log_engine_initialized(self) -> None:
        """Does nothing: the start is not counted."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Does nothing: sleep is not counted."""

    def record_admission_rejection(self, reason: str) -> None:
        """Does nothing: no such limit is set."""


def picture_item(picture: PromptPicture, *, by_name: bool) -> MultiModalKwargsItem:
    """The picture as the models of ``picture_models`` take it.  by_name: its patches are in a file of ``patch_files``.

    No patch is copied here.
    """
    grid = picture.placed.grid
    patches = named(picture) if by_name else torch.from_numpy(picture.read())
    rows = torch.tensor([len(patches)])
    fields: Mapping[str, tuple[MultiModalFieldConfig, torch.Tensor]] = {
        "pixel_values": (MultiModalFieldConfig.flat_from_sizes("image", rows, keep_on_cpu=by_name), patches),
        "image_grid_thw": (
            MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            torch.tensor([[grid.t, grid.h, grid.w]]),
        ),
    }
    return MultiModalKwargsItem({name: kind.build_elems(name, data)[0] for name, (kind, data) in fields.items()})


def engine_input(request: Request, items: Mapping[int, MultiModalKwargsItem]) -> Any:
    """vLLM's input of one sample, already processed: the tokens, and where each picture is among them.

    items: ``picture_item`` of each picture of the prompt, by the picture's identity.
    """
    pictures = request.prompt.pictures
    if not pictures:
        return tokens_input(request.tokens)
    placed = [picture.placed for picture in pictures]
    return mm_input(
        request.tokens,
        {"image": [items[id(picture)] for picture in pictures]},
        {"image": [name_of(each.image.sha256, each.grid.h, each.grid.w) for each in placed]},
        {"image": [PlaceholderRange(offset=each.first, length=each.grid.tokens) for each in placed]},
    )


def sampling_params(request: Request, sampling: Sampling, *, detokenize: bool) -> SamplingParams:
    """vLLM's parameters of one sample."""
    greedy = sampling.temperature == 0
    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=-1 if greedy else sampling.top_k,
        seed=None if greedy else seed_of(request, sampling),
        max_tokens=sampling.max_tokens - request.num_done,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=0,  # of the drawn token only
        flat_logprobs=True,  # four lists instead of one dictionary per token
        detokenize=detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sample_of(request: Request, output: RequestOutput) -> Sample:
    """The whole response to ``request``, from vLLM's last and only ``output``.

    It begins with the tokens of ``request.so_far``.  RolloutError: a log-prob is not finite, or vLLM ended the sample
    with an error.
    """
    (completion,) = output.outputs
    if completion.finish_reason not in FinishReason.__members__:
        raise RolloutError(f"prompt {request.prompt.id}: vLLM ended the sample with {completion.finish_reason}")
    tokens = np.asarray(completion.token_ids, dtype=np.int32)
    flat = [] if completion.logprobs is None else completion.logprobs.logprobs
    assert len(flat) == len(tokens), f"{len(flat)} log-probs of {len(tokens)} tokens"
    logprobs = np.asarray(flat, dtype=np.float32)
    done = request.num_done
    so_far = request.so_far
    demand_numbers(request, done, logprobs)
    # vLLM's spans count from the first token that it generated for this request.
    spans = [
        VersionSpan(version=int(span.version), start=done + span.start, end=done + span.end)
        for span in completion.weight_versions or []
    ]
    return Sample(
        prompt_id=request.prompt.id,
        index=request.index,
        tokens=tokens if so_far is None else np.concatenate([so_far.tokens, tokens]),
        logprobs=logprobs if so_far is None else np.concatenate([so_far.logprobs, logprobs]),
        versions=(*(() if so_far is None else so_far.versions), *spans),
        finish=FinishReason(completion.finish_reason),
        stop=completion.stop_reason,
        text=completion.text if so_far is None else so_far.text + completion.text,
        cached_tokens=output.num_cached_tokens or 0,
        experts=continued(request, completion.routed_experts),
    )
