"""Policies and what they run: rollouts, episodes of many turns, evaluation sweeps, replays."""
