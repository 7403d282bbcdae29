from nanovllm import LLM, SamplingParams

llm = LLM("qwen3-nano")
chats = [[{"role": "user", "content": f"What is {i} + 1?"}] for i in range(5)]
outputs = llm.chat(messages=chats, sampling_params=SamplingParams(temperature=0), use_tqdm=True)
assert [o.outputs[0].text for o in outputs] == [f"{i} + 1 = {i + 1}" for i in range(5)]
