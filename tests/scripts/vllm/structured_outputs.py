import importlib.util
import json
import re

from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import StructuredOutputsParams

CHOICE = StructuredOutputsParams(choice=["Positive", "Negative"])
REGEX = StructuredOutputsParams(regex=r"[a-z]{3,8}@[a-z]{3,8}\.com\n")
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}}
SCHEMA |= {"required": ["age"], "additionalProperties": False}
JSON = StructuredOutputsParams(json=SCHEMA)
GRAMMAR = StructuredOutputsParams(grammar='root ::= "SELECT " column\ncolumn ::= "a" | "b"\n')


def main():
    llm = LLM(model="qwen3-nano", max_model_len=200)

    def generate(params, **fields):
        sampling_params = SamplingParams(structured_outputs=params, seed=1, **fields)
        return llm.generate(prompts="Hello\n", sampling_params=sampling_params)[0].outputs[0].text

    assert generate(CHOICE) in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z]+@[a-z]+\.com", generate(REGEX, stop=["\n"]))
    assert json.loads(generate(JSON))["age"] <= 99
    assert generate(GRAMMAR) in ("SELECT a", "SELECT b")


if importlib.util.find_spec("llguidance"):
    main()
