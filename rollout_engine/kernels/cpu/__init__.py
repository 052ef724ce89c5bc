"""C++ kernels for the CPU, and their compilation. Each has an eager twin that runs if there is no compiler."""
