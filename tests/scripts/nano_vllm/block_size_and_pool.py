from nanovllm import LLM, SamplingParams

llm = LLM("qwen3-nano", kvcache_block_size=256, num_kvcache_blocks=4)
outs = llm.generate(
    ["Spell dog\n"] * 6, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False
)
assert {o["text"] for o in outs} == {"d-o-g"}
