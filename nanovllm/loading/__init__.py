"""From the options of LLM() to an engine. The only place that knows all others."""
