"""The brain: requests, blocks, prefix cache, scheduler, step. Plain Python: state in, decision out."""
