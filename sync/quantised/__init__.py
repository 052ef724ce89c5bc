"""Weights of quantised checkpoints, one file for each format. They are dequantised as they are read, one at a time."""
