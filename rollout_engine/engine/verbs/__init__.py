"""Every verb of an engine, written once: its name, arguments, result and effect, and when it may run.

Clients call them by name, the driver runs them, and every face has a method for each public one
(`rollout_engine.faces.verb_methods`). Arguments are checked against the annotations. Each function runs inside the
driver's lock, between two steps, unless its row of the table sets otherwise; every verb raises `LifecycleError`, naming
state and verb, if it is out of order, and after shutdown.

`timeout`, or `drain_timeout` if the wait is for requests, is in seconds; None: as long as the engine is busy with
earlier work (`Verb.timeout` explains this default and its bounds). After it a verb raises
`CallTimeoutError`, a `TimeoutError`: a call that has not begun by then never does.

Pausing, resuming, sleeping and waking are idempotent. While the engine does not run, calls that block until their
requests are complete (`LLM.generate`, `RolloutPolicy.rollout`) refuse to start; those in progress wait.
"""

from rollout_engine.engine.verb_table import VERBS
from rollout_engine.engine.verbs.drafts import add_kept_samples, get_kept_samples
from rollout_engine.engine.verbs.lifecycle import (
    is_paused,
    is_sleeping,
    meet_kv_peers,
    pause_generation,
    reset_prefix_cache,
    resume_generation,
    sleep,
    wait_for_requests_to_drain,
    wake_up,
)
from rollout_engine.engine.verbs.loras import add_lora, ensure_lora, list_loras, pin_lora, remove_lora, update_lora
from rollout_engine.engine.verbs.model import (
    apply_model,
    call_function,
    collective_rpc,
    get_missing_weights,
    get_model_metadata,
    get_own_names,
    get_unused_names,
    save_sharded_state,
    score,
    score_candidates,
)
from rollout_engine.engine.verbs.pictures import get_picture_features, reset_encoder_cache, reset_mm_cache
from rollout_engine.engine.verbs.reports import (
    check_health,
    check_integrity,
    get_cache_usage,
    get_core_metrics,
    get_num_unfinished_requests,
    require_running,
    start_profile,
    stop_profile,
)

__all__ = [
    "VERBS",
    "add_kept_samples",
    "get_kept_samples",
    "is_paused",
    "is_sleeping",
    "meet_kv_peers",
    "pause_generation",
    "reset_prefix_cache",
    "resume_generation",
    "sleep",
    "wait_for_requests_to_drain",
    "wake_up",
    "add_lora",
    "ensure_lora",
    "list_loras",
    "pin_lora",
    "remove_lora",
    "update_lora",
    "apply_model",
    "call_function",
    "collective_rpc",
    "get_missing_weights",
    "get_model_metadata",
    "get_own_names",
    "get_unused_names",
    "save_sharded_state",
    "score",
    "score_candidates",
    "get_picture_features",
    "reset_encoder_cache",
    "reset_mm_cache",
    "check_health",
    "check_integrity",
    "get_cache_usage",
    "get_core_metrics",
    "get_num_unfinished_requests",
    "require_running",
    "start_profile",
    "stop_profile",
]
