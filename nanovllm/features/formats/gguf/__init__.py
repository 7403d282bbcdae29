"""GGUF files, the format of llama.cpp, Ollama and LM Studio, as checkpoints that LLM() loads.

reader          the file, as a configuration and weights
gguf_tokenizer  its tokenizer
convert_gguf    a directory in Hugging Face layout, made from it
named           models that LLM() knows by name
"""
