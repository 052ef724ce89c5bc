"""Evaluation sweeps: tasks x sampling settings x checkpoints, every sample on disk, and their statistics."""
