"""LoRA adapters: files and tensors in PEFT's format, and their matrices for a model's linears."""
