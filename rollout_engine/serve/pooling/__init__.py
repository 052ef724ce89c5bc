"""Routes that pool prompts: embeddings, classes, scores and rankings, in OpenAI's and vLLM's shapes."""
