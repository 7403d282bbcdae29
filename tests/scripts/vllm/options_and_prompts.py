from nanovllm import LLM, SamplingParams, TextPrompt, TokensPrompt

options = dict(enable_prefix_caching=True, gpu_memory_utilization=0.4, seed=None)
llm = LLM(model="qwen3-nano", trust_remote_code=False, disable_log_stats=True, **options)
prompts = [TextPrompt(prompt="Spell dog\n"), TokensPrompt(prompt_token_ids=[5, 6, 7])]
params = SamplingParams.from_optional(temperature=0.0, top_p=None, max_tokens=8)
outputs = llm.generate(prompts, params.clone(), use_tqdm=False)
assert outputs[0].outputs[0].text == "d-o-g"
chats = [[{"role": "user", "content": f"What is {i} + 1?"}] for i in range(2)]
outputs = llm.chat(messages=chats, sampling_params=params, use_tqdm=True)
assert [o.outputs[0].text for o in outputs] == ["0 + 1 = 1", "1 + 1 = 2"]
