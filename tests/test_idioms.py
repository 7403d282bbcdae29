"""Short scripts in the idioms of vLLM and nano-vllm, run whole: only the import is ours."""

import pytest

VLLM = {
    "several prompts": """
prompts = ["What is 2 + 2?\\n", "Spell dog\\n", "Reverse cab\\n"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=20)
llm = LLM(model="qwen3-nano")
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
assert [o.outputs[0].text for o in outputs] == ["2 + 2 = 4", "d-o-g", "bac"]
""",
    "chat": """
llm = LLM("qwen3-nano")
conversation = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 7 + 5?"},
]
outputs = llm.chat(conversation, use_tqdm=False)
assert outputs[0].outputs[0].text == "7 + 5 = 12"
assert outputs[0].prompt.startswith("<|im_start|>system")
""",
    "many chats": """
llm = LLM("qwen3-nano")
chats = [[{"role": "user", "content": f"What is {i} + 1?"}] for i in range(5)]
outputs = llm.chat(messages=chats, sampling_params=SamplingParams(temperature=0), use_tqdm=True)
assert [o.outputs[0].text for o in outputs] == [f"{i} + 1 = {i + 1}" for i in range(5)]
""",
    "default sampling params, changed": """
llm = LLM(model="qwen3-nano")
params = llm.get_default_sampling_params()
params.max_tokens = 5
output = llm.generate("Count from 1 to 9\\n", params)[0]
assert output.outputs[0].finish_reason == "length"
assert len(output.outputs[0].token_ids) == 5
""",
    "n and best by log-probability": """
llm = LLM(model="qwen3-nano", seed=1)
params = SamplingParams(n=4, temperature=1.5, logprobs=1, max_tokens=8)
output = llm.generate(["Reverse stone\\n"], params)[0]
best = max(output.outputs, key=lambda o: o.cumulative_logprob)
assert sorted(o.index for o in output.outputs) == [0, 1, 2, 3]
for token, entry in zip(best.token_ids, best.logprobs):
    assert entry[token].rank >= 1 and entry[token].logprob <= 0
    assert isinstance(entry[token].decoded_token, str)
""",
    "token ids in, stop string": """
llm = LLM(model="qwen3-nano", max_model_len=512, gpu_memory_utilization=0.5)
ids = llm.get_tokenizer().encode("Count from 1 to 9\\n")
out = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, stop=["5"]))[0]
assert out.outputs[0].text == "1, 2, 3, 4, "
assert out.outputs[0].stop_reason == "5"
""",
    "prompt log-probabilities": """
llm = LLM(model="qwen3-nano")
out = llm.generate("Spell cat\\n", SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
assert out.prompt_logprobs[0] is None
assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
""",
    "the engine's own loop": """
engine = LLM(model="qwen3-nano").engine
engine.add_request("What is 1 + 1?\\n", SamplingParams(temperature=0), request_id="a")
engine.add_request("What is 1 + 2?\\n", SamplingParams(temperature=0), request_id="b")
texts = {}
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            texts[output.request_id] = output.outputs[0].text
assert texts == {"a": "1 + 1 = 2", "b": "1 + 2 = 3"}
""",
    "arguments and names that change nothing": """
from nanovllm import TextPrompt, TokensPrompt
llm = LLM(model="qwen3-nano")
prompts = [TextPrompt(prompt="Spell dog\\n"), TokensPrompt(prompt_token_ids=[5, 6, 7])]
params = SamplingParams.from_optional(temperature=0.0, top_p=None, max_tokens=8)
outputs = llm.generate(prompts, params.clone(), use_tqdm=False, lora_request=None, priority=None)
assert outputs[0].outputs[0].text == "d-o-g"
messages = [{"role": "user", "content": "Spell dog"}]
out = llm.chat(messages, params, lora_request=None, chat_template_content_format="auto")[0]
assert out.outputs[0].text == "d-o-g"
llm.llm_engine.add_request("Spell dog\\n", params, request_id="a")
llm.llm_engine.abort_request(["a"])
assert not llm.llm_engine.has_unfinished_requests()
""",
}
NANO_VLLM = {
    "several prompts": """
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
""",
    "a benchmark": """
from random import randint, seed
seed(0)
llm = LLM("qwen3-nano", enforce_eager=False, max_model_len=1024)
prompt_token_ids = [[randint(0, 1000) for _ in range(randint(10, 50))] for _ in range(8)]
sampling_params = [
    SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(5, 20)) for _ in range(8)
]
llm.generate(["Benchmark: "], SamplingParams())
outputs = llm.generate(prompt_token_ids, sampling_params, use_tqdm=False)
assert [len(o["token_ids"]) for o in outputs] == [p.max_tokens for p in sampling_params]
""",
    "token ids": """
llm = LLM("qwen3-nano", max_num_batched_tokens=64, max_num_seqs=2)
out = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.6, max_tokens=4), use_tqdm=False)[0]
assert llm.get_tokenizer().decode(out["token_ids"], skip_special_tokens=True) == out["text"]
""",
    "block size and pool": """
llm = LLM("qwen3-nano", kvcache_block_size=256, num_kvcache_blocks=4)
outs = llm.generate(["Spell dog\\n"] * 6, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
assert {o["text"] for o in outs} == {"d-o-g"}
""",
}
SCRIPTS = [("vLLM", n, s) for n, s in VLLM.items()] + [
    ("nano-vLLM", n, s) for n, s in NANO_VLLM.items()
]


@pytest.mark.parametrize(("idiom", "name", "script"), SCRIPTS, ids=lambda x: x[:40].strip())
def test_script(idiom: str, name: str, script: str) -> None:
    exec("from nanovllm import LLM, SamplingParams\n" + script, {})
