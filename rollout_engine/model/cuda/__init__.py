"""Steps, and a trainer's arithmetic, on one CUDA device: the Triton kernels. Its modules import Triton."""
