from nanovllm import LLM, RequestOutput, SamplingParams

test_prompts = [
    ("What is 1 + 1?\n", SamplingParams(temperature=0, logprobs=1, prompt_logprobs=1)),
    ("What is 1 + 2?\n", SamplingParams(temperature=0, presence_penalty=0.0)),
    ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, max_tokens=4)),
]
engine = LLM(model="qwen3-nano").llm_engine
request_id = 0
texts = {}
while test_prompts or engine.has_unfinished_requests():
    if test_prompts:
        prompt, sampling_params = test_prompts.pop(0)
        engine.add_request(prompt, sampling_params, request_id=str(request_id))
        request_id += 1
    request_outputs: list[RequestOutput] = engine.step()
    for request_output in request_outputs:
        if request_output.finished:
            texts[request_output.request_id] = request_output.outputs[0].text
engine.abort_request(["0"])
assert texts.keys() == {"0", "1", "2"}
assert (texts["0"], texts["1"]) == ("1 + 1 = 2", "1 + 2 = 3")
