"""The rows of Tinker's protocol in the table of routes."""

from rollout_engine.serve.route import Route
from rollout_engine.serve.route import route_rows as _rows
from rollout_engine.serve.tinker import handlers, runs, sampling, training

# fmt: off
TINKER_ROUTES: tuple[Route, ...] = (
    *_rows("GET", "/api/v1/healthz", "tinker", "anyone", handlers.health),
    *_rows("GET", "/api/v1/get_server_capabilities", "tinker", "client", handlers.capabilities),
    *_rows("POST", "/api/v1/client/config", "tinker", "client", handlers.client_config, is_raw=True),
    *_rows("POST", "/api/v1/client/dynamic_config", "tinker", "client", handlers.dynamic_config, is_raw=True),
    *_rows("POST", "/api/v1/telemetry", "tinker", "client", handlers.telemetry, is_raw=True),
    *_rows("POST", "/api/v1/create_session", "tinker", "client", handlers.create_session,
           ignored=handlers.ABOUT_CLIENTS),
    *_rows("POST", "/api/v1/session_heartbeat", "tinker", "client", handlers.heartbeat),
    *_rows("POST", "/api/v1/sessions/{id}/finish", "tinker", "client", handlers.finish_session),
    *_rows("POST", "/api/v1/create_sampling_session", "tinker", "client", handlers.create_sampler),
    *_rows("GET", "/api/v1/samplers/{id}", "tinker", "client", handlers.get_sampler),
    *_rows("POST", "/api/v1/asample", "tinker", "client", sampling.sample, "generate", body=sampling.SampleBody,
           neutral=sampling.UNSERVED),
    *_rows("POST", "/api/v1/retrieve_future", "tinker", "client", handlers.retrieve_future),
    *_rows("POST", "/api/v1/cancel_future", "tinker", "client", handlers.cancel_future),
    *_rows("POST", "/api/v1/create_model", "tinker", "client", training.create_model),
    *_rows("POST", "/api/v1/get_info", "tinker", "client", training.get_info),
    *_rows("POST", "/api/v1/unload_model", "tinker", "client", training.unload_model),
    *_rows("POST", "/api/v1/forward_backward", "tinker", "client", training.forward_backward, is_raw=True),
    *_rows("POST", "/api/v1/optim_step", "tinker", "client", training.optim_step, neutral={"optimizer_params": ()}),
    *_rows("POST", "/api/v1/save_weights", "tinker", "client", training.save_weights),
    *_rows("POST", "/api/v1/load_weights", "tinker", "client", training.load_weights),
    *_rows("POST", "/api/v1/save_weights_for_sampler", "tinker", "client", training.save_for_sampler),
    *_rows("POST", "/api/v1/weights_info", "tinker", "client", runs.weights_info),
    *_rows("GET", "/api/v1/training_runs/{id}", "tinker", "client", runs.get_run),
    *_rows("GET", "/api/v1/training_runs/{id}/checkpoints", "tinker", "client", runs.list_checkpoints),
    *_rows("DELETE", "/api/v1/training_runs/{id}/checkpoints/{kind}/{name}", "tinker", "client",
           runs.delete_checkpoint),
)
