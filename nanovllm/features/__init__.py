"""Optional kinds of requests and of memory. Each can be deleted."""
