"""Counters and gauges of a core at one moment."""

from copy import deepcopy

from rollout_engine.base.metrics import CoreMetrics
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.lifecycle import Lifecycle
from rollout_engine.core.request_table import RequestTable
from rollout_engine.core.scheduler import Scheduler


def read_metrics(scheduler: Scheduler, requests: RequestTable, lifecycle: Lifecycle, config: CoreConfig) -> CoreMetrics:
    """Counters and gauges of now."""
    tables = scheduler.tables
    num_tier_blocks, num_tier_bytes = (0, 0) if tables.tier is None else tables.tier.num_held
    return CoreMetrics(
        num_requests=len(requests.by_id),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + len(scheduler.parked) + requests.num_held_sequences,
        cache_usage=tables.usage,
        policy_version=tables.policy_version,
        state=lifecycle.state,
        counters=deepcopy(scheduler.stats),
        num_state_slots=config.num_state_slots,
        state_usage=tables.state_usage,
        num_state_snapshots=tables.num_state_snapshots,
        num_awaiting_version=requests.num_early_sequences(tables.policy_version),
        num_tier_blocks=num_tier_blocks,
        num_tier_bytes=num_tier_bytes,
    )
