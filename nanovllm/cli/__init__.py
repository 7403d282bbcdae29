"""What the command `nanovllm` runs: chat, batch jobs, conversion and traces."""
