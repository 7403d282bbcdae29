"""Runs large jobs: files in OpenAI's batch format, Ray Data, lm_eval."""
