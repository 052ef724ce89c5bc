"""The connection to a Ray cluster, for replicas and for the ranks of one engine."""
