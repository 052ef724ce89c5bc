"""Numerical kernels and their eager twins, independent of the engine."""
