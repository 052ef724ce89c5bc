"""Numerical kernels and their eager twins; they know nothing of the engine."""
