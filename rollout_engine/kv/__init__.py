"""Tiers of KV blocks outside the pool: connectors that keep the bytes of blocks, and find them again."""
