from nanovllm import LLM, SamplingParams

llm = LLM(model="qwen3-nano", max_model_len=512, gpu_memory_utilization=0.5)
ids = llm.get_tokenizer().encode("Count from 1 to 9\n")
out = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, stop=["5"]))[0]
assert out.outputs[0].text == "1, 2, 3, 4, "
assert out.outputs[0].stop_reason == "5"
