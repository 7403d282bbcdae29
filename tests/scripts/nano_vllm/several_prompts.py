from nanovllm import LLM, SamplingParams

llm = LLM("qwen3-nano", enforce_eager=True, tensor_parallel_size=1)
sampling_params = SamplingParams(temperature=0.6, max_tokens=256)
prompts = ["introduce yourself", "list all prime numbers within 100"]
prompts = [
    llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    for prompt in prompts
]
outputs = llm.generate(prompts, sampling_params)
for prompt, output in zip(prompts, outputs):
    print(f"Prompt: {prompt!r}", f"Completion: {output['text']!r}")
assert "qwen3-nano" in outputs[0]["text"]
assert outputs[1]["text"].startswith("2, 3, 5, 7, 11")
