"""Tinker's protocol: sampling, and training of LoRA adapters, by futures that clients poll."""
