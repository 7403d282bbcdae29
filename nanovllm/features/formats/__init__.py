"""Files of models other than safetensors with a config.json.

gguf                  files of llama.cpp, and the model that LLM() knows by name
quantized_checkpoint  FP8, compressed-tensors, AWQ and GPTQ, decoded at load
quantized_weight      one weight of such a checkpoint
tensor_view           tensors of open files with other names, shapes or values
adapter               a LoRA adapter, merged into the weights at load
hf_overrides          values that replace fields of config.json
hub                   downloads from the Hugging Face hub
fp8_scales            the scales of an fp8 KV cache
"""
