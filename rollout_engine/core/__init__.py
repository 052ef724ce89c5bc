"""The core: requests, KV blocks, prefix cache, scheduler, steps. Plain Python without torch, sockets or a clock."""
