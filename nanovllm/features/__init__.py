"""Optional kinds of requests, models, formats of checkpoints, and uses of memory."""
