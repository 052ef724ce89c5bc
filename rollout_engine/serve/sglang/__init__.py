"""The routes of SGLang's own dialect."""
