"""The HTTP server: engines for clients that speak OpenAI's, vLLM's or SGLang's dialect."""
