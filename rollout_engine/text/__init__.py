"""Turns prompts into token ids and token ids into text: tokenizers, chat templates, stop strings."""
