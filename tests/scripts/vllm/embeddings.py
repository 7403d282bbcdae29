from nanovllm import LLM

llm = LLM(model="qwen3-nano", runner="pooling", enforce_eager=True)
outputs = llm.embed(["Hello, my name is", "The capital of France is"])
for output in outputs:
    embedding = output.outputs.embedding
    assert abs(sum(x * x for x in embedding) - 1) < 1e-3
