"""Counts what vLLM's scheduler reports at every step, for ``Statistics``."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from mcore_rl.rollout.protocol import Statistics


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
        self._busy_s, self._seen_s = 0.0, time.monotonic()

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
