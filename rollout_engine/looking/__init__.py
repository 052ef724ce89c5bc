"""Pages and terminals that show rollouts, and the statistics of a training with their files and trackers."""
