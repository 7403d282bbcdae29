"""Batches of requests: files in OpenAI's format, Ray Data, lm_eval."""
