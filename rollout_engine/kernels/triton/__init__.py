"""Kernels in Triton for one CUDA device. Each has an eager twin; `availability` says where the twin has to serve.

Nothing outside this package imports Triton, but for the kernel that both ends of a weight transport need
(`sync.digest_kernel`); and nothing but the file that runs on a device imports this package.
"""
