"""Replicas of a fleet on a Ray cluster."""
