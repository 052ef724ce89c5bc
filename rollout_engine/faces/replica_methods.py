"""Methods of the faces for the replicas of a fleet."""

from rollout_engine.base.errors import LifecycleError
from rollout_engine.faces.frontend import Frontend
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


class ReplicaMethods:
    """Blocking methods, for faces that may wrap a fleet. Without one each raises `LifecycleError`."""

    frontend: Frontend

    def replicas(self) -> list[ReplicaHealth]:
        """The health of each replica, in the order of their indexes; those that were scaled away are DEAD."""
        return self._fleet.replicas()

    def scale(self, num_replicas: int) -> None:
        """Change the number of replicas. New ones serve once they are loaded; the requests of removed ones end first.

        Returns at once: `replicas` shows them start and end. Raises `ConfigError` for more than there is room for, and
        `LifecycleError` during an update.
        """
        self._fleet.scale(num_replicas)

    def restart_replicas(self) -> None:
        """Restart every replica, one after the other, once the one before it serves; requests continue at the others.

        Raises `RetryableError` if one does not start again.
        """
        self._fleet.restart()

    @property
    def _fleet(self) -> FleetClient:
        return fleet_of(self.frontend)
