"""Steps, and a trainer's arithmetic, on the CPU: the C++ kernels and oneDNN."""
