"""OpenAI's completions and chat over a sharded model, by transformers' handlers and its continuous batching."""

from tpcore.settings import Variable

API_KEY = Variable("TPCORE_API_KEY", str, "")
"""What clients of ``tpcore serve`` say: its ranks read it here, for their arguments stand in the list of processes."""
