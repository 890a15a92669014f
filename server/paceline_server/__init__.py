"""Continuous-batching LLM engine with an OpenAI-compatible gateway."""
