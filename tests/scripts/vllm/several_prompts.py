from nanovllm import LLM, SamplingParams

prompts = ["What is 2 + 2?\n", "Spell dog\n", "Reverse cab\n"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=20)
llm = LLM(model="qwen3-nano")
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
assert [o.outputs[0].text for o in outputs] == ["2 + 2 = 4", "d-o-g", "bac"]
