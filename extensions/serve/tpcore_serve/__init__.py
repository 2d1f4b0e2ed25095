"""OpenAI's completions and chat over a sharded model, by transformers' handlers and its continuous batching."""
