from random import randint, seed

from nanovllm import LLM, SamplingParams

seed(0)
llm = LLM("qwen3-nano", enforce_eager=False, max_model_len=1024)
prompt_token_ids = [[randint(0, 1000) for _ in range(randint(10, 50))] for _ in range(8)]
sampling_params = [
    SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(5, 20)) for _ in range(8)
]
llm.generate(["Benchmark: "], SamplingParams())
outputs = llm.generate(prompt_token_ids, sampling_params, use_tqdm=False)
assert [len(o["token_ids"]) for o in outputs] == [p.max_tokens for p in sampling_params]
