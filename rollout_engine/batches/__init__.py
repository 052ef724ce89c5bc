"""Tools for rollouts: print, join and cut them, write them to a file, convert them for another trainer's loss."""
