"""LoRA adapters: files and tensors in PEFT's format, and their matrices beside a model's linears."""
