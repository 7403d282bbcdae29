from nanovllm import LLM, SamplingParams, TextPrompt, TokensPrompt

llm = LLM(model="qwen3-nano")
prompts = [TextPrompt(prompt="Spell dog\n"), TokensPrompt(prompt_token_ids=[5, 6, 7])]
params = SamplingParams.from_optional(temperature=0.0, top_p=None, max_tokens=8)
outputs = llm.generate(prompts, params.clone(), use_tqdm=False, lora_request=None, priority=None)
assert outputs[0].outputs[0].text == "d-o-g"
messages = [{"role": "user", "content": "Spell dog"}]
out = llm.chat(messages, params, lora_request=None, chat_template_content_format="auto")[0]
assert out.outputs[0].text == "d-o-g"
llm.llm_engine.add_request("Spell dog\n", params, request_id="a")
llm.llm_engine.abort_request(["a"])
assert not llm.llm_engine.has_unfinished_requests()
