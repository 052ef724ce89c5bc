"""Hugging Face modules reading our cache, and the sampler behind them."""
