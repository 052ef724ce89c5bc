"""Methods of the faces for the replicas of a fleet."""

from rollout_engine.base.errors import LifecycleError
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.verb_methods import Face, of_frontend, of_frontend_async
from rollout_engine.fleet.run.client import FleetClient
from rollout_engine.fleet.run.replica_health import ReplicaHealth


def fleet_of(frontend: Frontend) -> FleetClient:
    """The client of a front end over a fleet. Raises `LifecycleError` for one over a single engine."""
    frontend.require_own_process()
    if not isinstance(frontend.client, FleetClient):
        what = "This engine has no replicas"
        raise LifecycleError(f"{what}: make it with num_replicas=2 or more, or placement='ray'.")
    return frontend.client


def require_replica(frontend: Frontend, replica_index: int | None) -> None:
    """Raise `RequestError` unless a fleet has this replica, and `RetryableError` unless that takes requests now."""
    if replica_index is not None:
        fleet_of(frontend).calls.require_serving(replica_index)


def replicas(frontend: Frontend) -> list[ReplicaHealth]:
    """The health of each replica, in the order of their indexes; those that were scaled away are DEAD.

    Raises `LifecycleError` without a fleet.
    """
    return fleet_of(frontend).replicas()


def scale(frontend: Frontend, num_replicas: int) -> None:
    """Change the number of replicas. New ones serve once they are loaded; the requests of removed ones end first.

    Does not wait for them: `replicas` shows them start and end. Raises `ConfigError` for more than there is room for,
    and `LifecycleError` during an update.
    """
    fleet_of(frontend).scale(num_replicas)


def restart_replicas(frontend: Frontend) -> None:
    """Restart every replica, one after the other, once the one before it serves; requests continue at the others.

    Raises `RetryableError` if one does not start again.
    """
    fleet_of(frontend).restart()


class ReplicaMethods(Face):
    """Blocking methods, for faces that may wrap a fleet. Without one each raises `LifecycleError`."""

    replicas = of_frontend(replicas)
    scale = of_frontend(scale)
    restart_replicas = of_frontend(restart_replicas)


class AsyncReplicaMethods(Face):
    """The same methods as coroutines."""

    replicas = of_frontend_async(replicas)
    scale = of_frontend_async(scale)
    restart_replicas = of_frontend_async(restart_replicas)
