"""Policies and their runs: rollouts, episodes of many turns, evaluation sweeps, replays."""
