"""Tools for rollouts: print, concatenate, split and save them, or convert them for another trainer."""
