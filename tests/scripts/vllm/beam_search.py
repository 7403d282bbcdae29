from nanovllm import LLM
from nanovllm.sampling_params import BeamSearchParams

llm = LLM(model="qwen3-nano")
params = BeamSearchParams(beam_width=3, max_tokens=20)
(output,) = llm.beam_search([{"prompt": "What is 12 + 30?\n"}], params)
assert len(output.sequences) == 3
assert output.sequences[0].text.endswith("12 + 30 = 42")
