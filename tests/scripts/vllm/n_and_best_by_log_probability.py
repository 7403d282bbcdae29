from nanovllm import LLM, SamplingParams

llm = LLM(model="qwen3-nano", seed=1)
params = SamplingParams(n=4, temperature=1.5, logprobs=1, max_tokens=8)
output = llm.generate(["Reverse stone\n"], params)[0]
best = max(output.outputs, key=lambda o: o.cumulative_logprob)
assert sorted(o.index for o in output.outputs) == [0, 1, 2, 3]
for token, entry in zip(best.token_ids, best.logprobs):
    assert entry[token].rank >= 1
    assert entry[token].logprob <= 0
    assert isinstance(entry[token].decoded_token, str)
