from nanovllm import LLM, SamplingParams

engine = LLM(model="qwen3-nano").engine
engine.add_request("What is 1 + 1?\n", SamplingParams(temperature=0), request_id="a")
engine.add_request("What is 1 + 2?\n", SamplingParams(temperature=0), request_id="b")
texts = {}
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            texts[output.request_id] = output.outputs[0].text
assert texts == {"a": "1 + 1 = 2", "b": "1 + 2 = 3"}
