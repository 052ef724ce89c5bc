"""Loads a checkpoint from disk into a module."""
