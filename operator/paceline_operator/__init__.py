"""Kubernetes operator, metrics adapter and local mode for LLMServices."""
