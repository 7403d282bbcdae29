from nanovllm import LLM

llm = LLM(model="qwen3-nano")
params = llm.get_default_sampling_params()
params.max_tokens = 5
output = llm.generate("Count from 1 to 9\n", params)[0]
assert output.outputs[0].finish_reason == "length"
assert len(output.outputs[0].token_ids) == 5
