"""Adapters of trainers, one module each: their loop, loss and logging stay, and the rollouts are this engine's."""
