"""GGUF files, the format of llama.cpp, Ollama and LM Studio, as checkpoints that LLM() loads.

gguf_tokenizer  its tokenizer
convert_gguf    a directory in Hugging Face layout, made from a file
named           the model that LLM() knows by name
"""
