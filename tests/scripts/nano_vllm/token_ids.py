from nanovllm import LLM, SamplingParams

llm = LLM("qwen3-nano", max_num_batched_tokens=64, max_num_seqs=2)
out = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.6, max_tokens=4), use_tqdm=False)[0]
assert llm.get_tokenizer().decode(out["token_ids"], skip_special_tokens=True) == out["text"]
