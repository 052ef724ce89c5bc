"""Routes that tell whether the engine serves."""

from rollout_engine.base.errors import EngineDeadError
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served


async def health(served: Served, asked: Asked) -> Reply:
    """200 while the engine lives; 503 once it is gone, or the server is stopping."""
    problem = served.engine.frontend.client.dead_error
    if problem is not None:
        raise HttpProblem(503, f"The engine is gone: {problem}")
    if served.is_ending:
        raise HttpProblem(503, "The server is stopping.")
    return Reply({"status": "ok", "weight_version": served.weight_version, "is_paused": served.is_paused})


async def health_generate(served: Served, asked: Asked) -> Reply:
    """200 once the engine has answered a call between two of its steps."""
    try:
        report = await served.engine.check_health(timeout=10.0)
    except EngineDeadError as problem:
        raise HttpProblem(503, f"The engine is gone: {problem}") from problem
    return Reply({"status": "ok", "health": report})
