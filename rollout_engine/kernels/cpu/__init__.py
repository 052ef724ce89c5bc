"""Kernels in C++ for the CPU, and how they are built. Each has an eager twin that serves where no compiler is."""
