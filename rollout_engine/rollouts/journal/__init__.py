"""Durable rollouts: an append-only journal from which the same call continues after its process was killed."""
