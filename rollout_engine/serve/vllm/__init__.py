"""The routes that vLLM added for reinforcement learning."""
