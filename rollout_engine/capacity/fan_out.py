"""When new weights are at each node, and staged by each of its replicas."""

from rollout_engine.capacity.options import FleetTable, WeightsTable


class FanOut:
    """Seconds from the begin of an update until replicas have staged it. The trainer is on the first node.

    A node sends to its children at the same time, so each edge has its share of the node's network; it passes a chunk
    on once it has it. So the weights are at depth d after

        degree x bytes / rate  +  (d - 1) x (degree x chunk / rate)  +  d x latency,

    with the degree 1 in a chain, and all receivers in a star.
    """

    def __init__(self, weights: WeightsTable, fleet: FleetTable) -> None:
        per_replica = weights.publications == "replica"
        self._weights = weights
        self._replicas_per_receiver = 1 if per_replica else fleet.replicas_per_node
        self._num_receivers = fleet.num_replicas if per_replica else fleet.num_nodes - 1
        self._first_receiver = 0 if per_replica else 1
        self._rate = weights.network_gigabytes_per_second
        if per_replica:  # replicas of one node send and receive through the same network
            self._rate /= min(fleet.replicas_per_node, fleet.num_replicas)
        self._num_readers = 1 if per_replica else min(fleet.replicas_per_node, fleet.num_replicas)

    @property
    def publish_seconds(self) -> float:
        """Seconds until the first node has the weights."""
        return self._weights.gigabytes / self._weights.publish_gigabytes_per_second

    @property
    def stage_seconds(self) -> float:
        """Seconds in which a replica reads them, concurrently with all others of its node."""
        weights = self._weights
        alone = weights.gigabytes / weights.stage_gigabytes_per_second
        return max(alone, self._num_readers * weights.gigabytes / weights.node_read_gigabytes_per_second)

    @property
    def network_gigabytes(self) -> float:
        """Bytes that cross the network in one update."""
        return self._num_receivers * self._weights.gigabytes

    def arrival_seconds(self, receiver: int) -> float:
        """Seconds from the publication until the receiver of that number, from 0, has everything."""
        if receiver < self._first_receiver:
            return 0.0
        weights = self._weights
        depth = self._depth(receiver + 1 - self._first_receiver)
        seconds = self._degree / self._rate
        passed_on = (depth - 1) * seconds * weights.chunk_megabytes / 1e3
        return seconds * weights.gigabytes + passed_on + depth * weights.latency_seconds

    def staged_seconds(self, replica: int) -> float:
        """Seconds from the begin of the update until that replica has staged it."""
        receiver = replica // self._replicas_per_receiver
        return self.publish_seconds + self.arrival_seconds(receiver) + self.stage_seconds

    @property
    def _degree(self) -> int:
        match self._weights.fan_out:
            case "chain":
                return 1
            case "star":
                return max(self._num_receivers, 1)
            case "tree":
                return min(self._weights.tree_degree, max(self._num_receivers, 1))

    def _depth(self, position: int) -> int:
        """Depth of a node in the order of a breadth-first walk, the root's position being 0."""
        degree, depth = self._degree, 0
        if degree == 1:
            return position
        while position:
            position, depth = (position - 1) // degree, depth + 1
        return depth
