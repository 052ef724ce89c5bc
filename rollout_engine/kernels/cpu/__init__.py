"""C++ kernels for the CPU, and their compilation. Each has an eager twin that runs where no compiler is."""
