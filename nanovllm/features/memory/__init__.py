"""Memory and devices: KV blocks in host memory, and several ranks."""
