"""Evaluation packages of others, with this engine as their model."""
