"""SmolLM2-135M-Instruct, whose weights somebody else trained, compared with transformers in float32.

The reference of a greedy output is one pass of transformers over the prompt and the output: each
token must have the largest logit, given all before it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanovllm.loading.checkpoint import find_checkpoint

try:
    PATH = find_checkpoint("smollm2-135m")
except ValueError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = [pytest.mark.real, pytest.mark.slow]
NEAR_TIE = 1e-4
QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "Name three planets.",
    "Explain what a computer is to a child.",
    "What is 12 + 30?",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' to Spanish.",
    "Tell me a story about a fox and a crow.",
    "List five fruits with their colours.",
    "What should I pack for a week in the mountains?",
    "Give me a recipe for pancakes, step by step.",
    "What is the difference between a lake and a river?",
    "Wie heißt die Hauptstadt von Österreich? 你好 🙂",
]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SYSTEM = "You are a patient teacher who answers in plain words and gives an example. " * 8
TEXT = Path(find_checkpoint.__code__.co_filename).read_text()[:1500]


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()


def make_llm(**options: Any) -> LLM:
    return LLM("smollm2-135m", dtype="float32", **{"max_model_len": 2048, **options})


@pytest.fixture(scope="module")
def real() -> LLM:
    return make_llm()


def log_probs(reference: Any, ids: list[int]) -> torch.Tensor:
    """The log-probabilities [len(ids), V] of the token after each."""
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].log_softmax(-1)


def check_greedy(reference: Any, outputs: list[Any]) -> int:
    """Check that each token is the most likely one. Returns how many are the other of a near tie."""
    num_ties = 0
    for output in outputs:
        prompt, new = output.prompt_token_ids, output.outputs[0].token_ids
        rows = log_probs(reference, [*prompt, *new])[len(prompt) - 1 : -1]
        gaps = rows.amax(dim=1) - rows[range(len(new)), new]
        assert gaps.max() < NEAR_TIE, (output.prompt, int(gaps.argmax()), float(gaps.max()))
        num_ties += int((gaps > 0).sum())
    return num_ties


@pytest.mark.parametrize("case", ["batched", "system prompt", "chunked and preempted"])
def test_greedy_tokens(reference: Any, real: LLM, case: str) -> None:
    chats = CHATS
    if case == "batched":
        llm = real
    elif case == "system prompt":
        llm = real
        chats = [[{"role": "system", "content": SYSTEM}, *chat] for chat in CHATS]
        llm.chat(chats[0], SamplingParams(max_tokens=1), use_tqdm=False)
    else:
        options = dict(max_num_batched_tokens=24, enable_prefix_caching=False)
        llm = make_llm(num_kv_cache_blocks=24, max_model_len=320, **options)
    outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    assert sum(len(output.outputs[0].token_ids) for output in outputs) > 400
    assert check_greedy(reference, outputs) <= 2
    if case == "system prompt":
        assert all(output.num_cached_tokens >= 100 for output in outputs)
    if case == "chunked and preempted":
        assert llm.stats()["preemptions"] > 0


def test_log_probabilities(reference: Any, real: LLM) -> None:
    ids = real.get_tokenizer().encode(TEXT)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2)
    output = real.generate([ids], params, use_tqdm=False)[0]
    rows = log_probs(reference, [*ids, *output.outputs[0].token_ids])
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(entries) == len(ids) + 7
    for row, entry in zip(rows, entries, strict=False):
        for token, logprob in entry.items():
            assert abs(row[token].item() - logprob.logprob) < 1e-4


def test_beams(reference: Any, real: LLM) -> None:
    """No greedy output is more likely, and the scores are the sums of transformers."""
    prompt = "The capital of France is"
    params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True)
    (found,) = real.beam_search([prompt], params, use_tqdm=False)
    ids = real.get_tokenizer().encode(prompt)
    sums = []
    for sequence in found.sequences:
        new = sequence.tokens[len(ids) :]
        rows = log_probs(reference, sequence.tokens)[len(ids) - 1 : -1]
        sums.append(rows[range(12), new].sum().item())
        assert abs(sums[-1] - sequence.cum_logprob) < 1e-3
    assert sums == sorted(sums, reverse=True)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    output = real.generate(prompt, greedy, use_tqdm=False)[0].outputs[0]
    assert sums[0] >= output.cumulative_logprob - 1e-3
    # The reference of the whole search is transformers' with as many beams.
    with torch.no_grad():
        wanted = reference.generate(
            torch.tensor([ids]), num_beams=4, do_sample=False, min_new_tokens=12, max_new_tokens=12
        )
    assert found.sequences[0].tokens == wanted[0].tolist()


def test_embeddings_and_loglikelihoods(reference: Any, real: LLM) -> None:
    texts = ["A dog runs in the park.", "The stock market fell.", "你好,世界"]
    for text, output in zip(texts, real.embed(texts, use_tqdm=False), strict=True):
        ids = torch.tensor([real.get_tokenizer().encode(text)])
        with torch.no_grad():
            hidden = reference.model(ids).last_hidden_state[0, -1]
        wanted = hidden / hidden.norm()
        assert (torch.tensor(output.outputs.embedding) - wanted).abs().max() < 1e-4
    endings = [" Paris.", " London.", " a banana."]
    prompt = "The capital of France is"
    ids = real.get_tokenizer().encode(prompt)
    scores = real.loglikelihood(prompt, endings, use_tqdm=False)
    for score in scores:
        rows = log_probs(reference, [*ids, *score.token_ids])[len(ids) - 1 : -1]
        wanted = rows[range(len(score.token_ids)), score.token_ids].sum().item()
        assert abs(wanted - score.logprob) < 1e-3
    assert max(scores, key=lambda score: score.logprob) is scores[0]


# Two examples, then texts with the fields that a person would expect.
EXAMPLES = [
    ("Nina is 30 and lives in Vienna.", {"name": "Nina", "age": 30, "city": "Vienna"}),
    (
        "Oscar Diaz, a 58 year old cook, is from Lima.",
        {"name": "Oscar Diaz", "age": 58, "city": "Lima"},
    ),
]
EXPECTED = [
    ("Maria Lopez is 34 years old and lives in Madrid.", ("Maria Lopez", 34, "Madrid")),
    ("Tom is a 27 year old teacher from London.", ("Tom", 27, "London")),
    ("My name is Anna, I am 19 and I live in Berlin.", ("Anna", 19, "Berlin")),
    ("John Smith, aged 52, moved to Chicago.", ("John Smith", 52, "Chicago")),
    ("In Tokyo lives Kenji. He is 41 years old.", ("Kenji", 41, "Tokyo")),
    ("Sara turned 8 this week in Rome.", ("Sara", 8, "Rome")),
    ("The 63 year old Peter works in Oslo.", ("Peter", 63, "Oslo")),
    ("Emma Brown is 45. Her home is Boston.", ("Emma Brown", 45, "Boston")),
    ("Lucas, 22, studies in Paris.", ("Lucas", 22, "Paris")),
    ("At 71, David still runs a shop in Dublin.", ("David", 71, "Dublin")),
]


def test_structured_outputs(real: LLM) -> None:
    """All are valid, and at least 8 of 10 have the expected values."""
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    kinds = {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}}
    schema = {"type": "object", "properties": kinds, "required": [*kinds]}
    schema["additionalProperties"] = False
    chat = [{"role": "system", "content": "Answer with the fields of the text as JSON."}]
    for text, fields in EXAMPLES:
        chat += [{"role": "user", "content": text}]
        chat += [{"role": "assistant", "content": json.dumps(fields)}]
    rule = StructuredOutputsParams(json=schema)
    params = SamplingParams(temperature=0, max_tokens=64, structured_outputs=rule)
    chats = [[*chat, {"role": "user", "content": text}] for text, _ in EXPECTED]
    right = 0
    for output, (_, values) in zip(real.chat(chats, params, use_tqdm=False), EXPECTED, strict=True):
        found = json.loads(output.outputs[0].text)
        jsonschema.validate(found, schema)
        right += found == dict(zip(kinds, values, strict=True))
    assert right >= 8
