"""Builds an engine from the options of LLM(), and connects all places that an engine needs."""
