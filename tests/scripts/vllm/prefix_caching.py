from nanovllm import LLM, SamplingParams

prefix = "You are a careful teacher of arithmetic. Answer in one short line. " * 3
prompts = [prefix + text for text in ("What is 2 + 2?\n", "Spell dog\n", "Reverse cab\n")]
sampling_params = SamplingParams(temperature=0.0, max_tokens=8)

regular_llm = LLM(model="qwen3-nano", enable_prefix_caching=False, gpu_memory_utilization=0.4)
regular_texts = [out.outputs[0].text for out in regular_llm.generate(prompts, sampling_params)]
del regular_llm

cached_llm = LLM(model="qwen3-nano", enable_prefix_caching=True, gpu_memory_utilization=0.4)
cached_llm.generate(prompts[0], sampling_params)
outputs = cached_llm.generate(prompts, sampling_params)
assert [out.outputs[0].text for out in outputs] == regular_texts
assert all(out.num_cached_tokens >= 16 for out in outputs)
