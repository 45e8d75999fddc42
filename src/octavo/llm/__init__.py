"""The composition root: from a config to an engine, and `LLM`, the way into it from Python."""
