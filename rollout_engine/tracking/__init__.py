"""Statistics of a training, step by step: what they are, the file that they go to, and trackers that take them."""
