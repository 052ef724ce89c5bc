"""Triton kernels for one CUDA device. Each has an eager twin; `availability` reports when only the twin can run.

Besides this package only `sync.digest_kernel` imports Triton. Import this package only if `availability` allows.
"""
