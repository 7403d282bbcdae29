"""GGUF files, the format of llama.cpp, Ollama and LM Studio, as checkpoints that LLM() loads."""
