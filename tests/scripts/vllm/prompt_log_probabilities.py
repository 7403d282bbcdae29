from nanovllm import LLM, SamplingParams

llm = LLM(model="qwen3-nano")
out = llm.generate("Spell cat\n", SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
assert out.prompt_logprobs[0] is None
assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
