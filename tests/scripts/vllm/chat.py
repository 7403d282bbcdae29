from nanovllm import LLM

llm = LLM("qwen3-nano")
conversation = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 7 + 5?"},
]
outputs = llm.chat(conversation, use_tqdm=False)
assert outputs[0].outputs[0].text == "7 + 5 = 12"
assert outputs[0].prompt.startswith("<|im_start|>system")
