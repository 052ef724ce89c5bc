"""What a trainer does with a rollout: print it, join and cut it, write it down, hand it to another trainer's loss."""
