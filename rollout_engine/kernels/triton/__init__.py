"""Triton kernels for one CUDA device. Each has an eager twin; `availability` says where only the twin can run.

Besides this package only `sync.digest_kernel` imports Triton. Import this package only where `availability` allows.
"""
