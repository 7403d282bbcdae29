"""Scores equal the model card's code of Qwen3-Reranker with transformers, and cosines."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, random_llm
from family_checkpoints import make_family_checkpoint
from scripted import run_bodies

from nanovllm import LLM, SamplingParams
from nanovllm.loading.checkpoint import find_checkpoint

QUERY = "What is the capital of China?"
DOCUMENTS = ["The capital of China is Beijing.", "Gravity", "", "Grüße 你好 😀\n<think> yes", QUERY]
TASK = "Find documents about cities"


def add_tokenizer(path: Path, *words: str) -> Path:
    """Give a checkpoint the tokenizer of the embedded model, with these words as tokens."""
    source = find_checkpoint("qwen3-nano")
    rules = json.loads((source / "tokenizer.json").read_text())
    for word in words:
        size = len(rules["model"]["vocab"]) + len(rules["added_tokens"])
        token = rules["added_tokens"][-1] | {"id": size, "content": word}
        rules["added_tokens"].append(token)
    (path / "tokenizer.json").write_text(json.dumps(rules))
    shutil.copy(source / "tokenizer_config.json", path)
    return path


@pytest.fixture(scope="session")
def reranker(tmp_path_factory) -> tuple[LLM, torch.nn.Module]:
    path = tmp_path_factory.mktemp("reranker")
    model = make_checkpoint(path, tie=True, vocab_size=1100, max_position_embeddings=1024)
    add_tokenizer(path, "yes", "no")
    return random_llm(path, skip_tokenizer_init=False, num_kv_cache_blocks=400), model


def model_card(tokenizer: Any, model: torch.nn.Module, query: str, doc: str, task: str) -> float:
    """The steps of the model card: three parts of the prompt, and a softmax over "no" and "yes"."""
    prefix = '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    pair = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {doc}"
    ids = tokenizer.encode(prefix, add_special_tokens=False)
    ids += tokenizer(pair)["input_ids"]
    ids += tokenizer.encode(suffix, add_special_tokens=False)
    with torch.inference_mode():
        last = model(torch.tensor([ids])).logits[0, -1]
    both = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    return last[both].log_softmax(dim=0)[1].exp().item()


@pytest.mark.parametrize("task", [None, TASK])
def test_scores_equal_the_model_card(
    reranker: tuple[LLM, torch.nn.Module], task: str | None
) -> None:
    llm, model = reranker
    llm.reset_prefix_cache()
    found = llm.score(QUERY, DOCUMENTS, use_tqdm=False, instruction=task)
    text = task or "Given a web search query, retrieve relevant passages that answer the query"
    tokenizer = llm.get_tokenizer()
    wanted = [model_card(tokenizer, model, QUERY, doc, text) for doc in DOCUMENTS]
    scores = [output.outputs.score for output in found]
    assert scores == pytest.approx(wanted, abs=1e-4)
    assert max(scores) - min(scores) > 0.1
    assert len({output.request_id for output in found}) == len(found)
    # What all prompts share is computed by the first one, except for its last partial block.
    ids = [output.prompt_token_ids for output in found]
    shared = next(i for i, tokens in enumerate(zip(*ids, strict=False)) if len(set(tokens)) > 1)
    assert [o.num_cached_tokens for o in found] == [0, *[shared // 16 * 16] * 4]
    assert shared > 64


def test_scores_of_qwen3_vl(tmp_path) -> None:
    """The prompt of the authors' script: parts of a message without spaces, and no thoughts."""
    sizes = dict(vocab_size=1100, max_position_embeddings=1024)
    model = make_family_checkpoint(tmp_path / "vl-reranker", "qwen3vl", **sizes)
    path = add_tokenizer(tmp_path / "vl-reranker", "yes", "no")
    llm = random_llm(path, skip_tokenizer_init=False, num_kv_cache_blocks=400)
    tokenizer, task = llm.get_tokenizer(), "retrieve relevant candidates that answer the query."
    both = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    found = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    for document, output in zip(DOCUMENTS, found, strict=True):
        text = tokenizer.decode(output.prompt_token_ids)
        content = f"{task}<Query>:{QUERY}\n<Document>:{document}"
        assert text.endswith(f"{content}<|im_end|>\n<|im_start|>assistant\n")
        with torch.inference_mode():
            last = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        wanted = last[both].softmax(dim=0)[1].item()
        assert output.outputs.score == pytest.approx(wanted, abs=1e-4)


def test_pairs(reranker: tuple[LLM, torch.nn.Module]) -> None:
    llm, _ = reranker
    queries = [QUERY, "Gravity", "a", "b", "c"]
    wanted = [llm.score(q, d, use_tqdm=False)[0] for q, d in zip(queries, DOCUMENTS, strict=True)]
    found = llm.score(queries, DOCUMENTS, use_tqdm=False)
    assert [x.prompt_token_ids for x in found] == [x.prompt_token_ids for x in wanted]
    scores = [output.outputs.score for output in found]
    assert scores == [output.outputs.score for output in wanted]
    processed = random_llm(
        llm.engine.checkpoint.directory,
        **dict(skip_tokenizer_init=False, num_kv_cache_blocks=80),
        logprobs_mode="processed_logprobs",
    )
    found = processed.score(queries, DOCUMENTS, use_tqdm=False)
    assert [output.outputs.score for output in found] == pytest.approx(scores, abs=1e-5)


def test_cosines_of_embeddings(tmp_path) -> None:
    make_checkpoint(tmp_path, tie=True, vocab_size=1100)
    add_tokenizer(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}  # embeddings are not normalized
    modules = [{"path": p, "type": f"sentence_transformers.models.{k}"} for p, k in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    llm = random_llm(tmp_path, skip_tokenizer_init=False)
    texts = ["a", "What is 2 + 3?", "Spell garden"]
    vectors = [torch.tensor(o.outputs.embedding) for o in llm.embed(texts, use_tqdm=False)]
    wanted = [torch.cosine_similarity(vectors[0], v, dim=0).item() for v in vectors]
    found = llm.score("a", texts, use_tqdm=False)
    assert [o.outputs.score for o in found] == pytest.approx(wanted, abs=1e-5)
    found = llm.score(texts, texts, use_tqdm=False)
    assert [o.outputs.score for o in found] == pytest.approx([1, 1, 1], abs=1e-5)
    one = llm.get_tokenizer().encode("a")
    assert found[0].prompt_token_ids == one * 2
    with pytest.raises(ValueError, match="instruction='x' is for rerankers"):
        llm.score("a", texts, instruction="x", use_tqdm=False)
    for first, second, name in (("", "a", "data_1"), ("a", "", "data_2")):
        with pytest.raises(ValueError, match=rf"^{name}\[0\]: the prompt is empty"):
            llm.score(first, second, use_tqdm=False)


WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    ("a", [], ValueError, "data_2 is empty"),
    ([], "a", ValueError, "data_1 is empty"),
    (["a", "b"], ["c"], ValueError, "data_1 has 2 texts and data_2 has 1"),
    ("a", None, TypeError, "data_2 must be a string, .* not None"),
    ("a", [1], TypeError, "a text of data_2 must be a string"),
    ({"a": 1}, "b", TypeError, "a text of data_1 must be a string"),
    ("a", "\ud800", ValueError, "UTF-8"),
    ("a", ["b", "word " * 2000], ValueError, r"^data_2\[1\]: the prompt has .* max_model_len"),
]


@pytest.mark.parametrize(("first", "second", "kind", "message"), WRONG)
def test_what_is_refused(
    reranker: tuple[LLM, torch.nn.Module], first: Any, second: Any, kind: Any, message: str
) -> None:
    with pytest.raises(kind, match=message):
        reranker[0].score(first, second, use_tqdm=False)


def test_models_without_scores(
    embedded: LLM, path: Path, reranker: tuple[LLM, torch.nn.Module], tmp_path
) -> None:
    """A model with "yes" and "no" is no reranker unless its name or hf_overrides say so."""
    source = reranker[0].engine.checkpoint.directory
    shutil.copytree(source, chat := tmp_path / "chat")
    shutil.copytree(source, hub := tmp_path / "models--a--A-Rerank" / "snapshots" / "3f")
    options = dict(skip_tokenizer_init=False)
    vllm = {
        "architectures": ["Qwen3ForSequenceClassification"],
        **{"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True},
    }
    wanted = reranker[0].score(QUERY, DOCUMENTS[0], use_tqdm=False)[0].outputs.score
    for llm in (random_llm(hub, **options), random_llm(chat, hf_overrides=vllm, **options)):
        found = llm.score(QUERY, DOCUMENTS[0], use_tqdm=False)[0].outputs.score
        assert found == wanted
    other = vllm | {"classifier_from_token": ["0", "1"]}
    for llm in (
        *(embedded, random_llm(chat, **options), random_llm(chat, hf_overrides=other, **options)),
    ):
        with pytest.raises(ValueError, match="Pooling or LogitScore.*'rerank' in.*hf_overrides="):
            llm.score("a", "b", use_tqdm=False)
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        random_llm(path).score("a", "b", use_tqdm=False)


FLAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ end }}"
PARTS = FLAT.replace("m.content", "m.content[0].text")
HEAD = {"true_token_id": 7, "false_token_id": 3}
READING = {
    "modality_config": {"message": {"method": "forward"}},
    "processing_kwargs": {"chat_template": {"end": "[end]"}},
}


def logit_score(source: Path, path: Path, template: str, head: dict, reading: dict) -> LLM:
    """A CrossEncoder of sentence-transformers, with the weights and the tokenizer of `source`."""
    shutil.copytree(source, path, dirs_exist_ok=True)
    modules = [{"path": "", "type": "a.b.Transformer"}, {"path": "1", "type": "a.b.LogitScore"}]
    settings = {"prompts": {"web": "Find it"}, "default_prompt_name": "web"}
    (path / "1").mkdir()
    (path / "chat_template.jinja").write_text(template)
    for name, fields in (
        ("modules.json", modules),
        ("config_sentence_transformers.json", settings),
        ("sentence_bert_config.json", reading),
        ("1/config.json", head),
    ):
        (path / name).write_text(json.dumps(fields))
    return random_llm(path, skip_tokenizer_init=False)


@pytest.mark.parametrize("template", [FLAT, PARTS])
def test_a_reranker_of_sentence_transformers(
    reranker: tuple[LLM, torch.nn.Module], tmp_path, template: str
) -> None:
    """It has the tokens of its LogitScore, and the prompt of its chat template."""
    source, model = reranker[0].engine.checkpoint.directory, reranker[1]
    llm = logit_score(source, tmp_path, template, HEAD, READING)
    for task in (None, TASK):
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False, instruction=task)
        for output, document in zip(found, DOCUMENTS, strict=True):
            text = f"[system]{task or 'Find it'}[query]{QUERY}[document]{document}[end]"
            ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
            assert output.prompt_token_ids == ids
            with torch.inference_mode():
                last = model(torch.tensor([ids])).logits[0, -1]
            wanted = torch.sigmoid(last[7] - last[3]).item()
            assert output.outputs.score == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("template", "head", "reading", "words"),
    [
        (FLAT, {"true_token_id": 7}, READING, "true_token_id=7, false_token_id=None; supp"),
        (FLAT, {"true_token_id": 7, "false_token_id": 5000}, READING, "token id 5000"),
        (FLAT, HEAD | {"scale": 2}, READING, "scale=2"),
        (FLAT, HEAD, READING | {"max_seq_length": 9}, "max_seq_length=9; shorten it"),
        (FLAT, HEAD, READING | {"do_lower_case": True}, "do_lower_case=True"),
        (FLAT, HEAD, READING | {"query_length": 3}, "query_length=3"),
        (FLAT, HEAD, {"processing_kwargs": {"text": {"max_length": 2}}}, "text={'max_length': 2}"),
        ("{{ messages[-1].content }}", HEAD, READING, "not render the roles query"),
        (
            "{% for m in messages[-2:] %}{{ m.content }}{% endfor %}",
            HEAD,
            READING,
            "document and system",
        ),
        ("{{ raise_exception('no') }}", HEAD, READING, "does not render the roles"),
    ],
)
def test_rerankers_that_are_not_supported(
    reranker: tuple[LLM, torch.nn.Module],
    tmp_path,
    template: str,
    head: dict,
    reading: dict,
    words: str,
) -> None:
    source = reranker[0].engine.checkpoint.directory
    llm = logit_score(source, tmp_path, template, head, reading)
    with pytest.raises(ValueError, match=words):
        llm.score("a", "b", use_tqdm=False, instruction="c")


def test_nan_is_an_error(tmp_path) -> None:
    model = make_checkpoint(path := tmp_path / "reranker", tie=True, vocab_size=1100)
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    model.save_pretrained(path)
    llm = random_llm(add_tokenizer(path, "yes", "no"), skip_tokenizer_init=False)
    with pytest.raises(ArithmeticError, match="no score: the model computed NaN"):
        llm.score("a", "b", use_tqdm=False)


def test_a_file_of_requests(reranker: tuple[LLM, torch.nn.Module], tmp_path) -> None:
    llm, _ = reranker
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("score", {"data_1": QUERY, "data_2": DOCUMENTS}),
        ("score", {"queries": QUERY, "documents": DOCUMENTS[0], "instruction": TASK}),
        ("score", {"text_1": [QUERY] * 5, "text_2": DOCUMENTS}),
        ("rerank", {"query": QUERY, "documents": DOCUMENTS}),
        ("rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "instruction": TASK}),
        ("score", {"data_1": QUERY}),
        ("rerank", {"query": [QUERY], "documents": DOCUMENTS}),
        ("rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": -1}),
        ("rerank", {"query": QUERY, "document": DOCUMENTS}),
        ("score", {"queries": QUERY, "documents": [3], "top_n": 1}),
    ]
    results = run_bodies(llm, tmp_path, [(f"/v1/{url}", body) for url, body in bodies])
    done = [result["response"]["body"] for result in results]
    plain = [o.outputs.score for o in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    asked = [o.outputs.score for o in llm.score(QUERY, DOCUMENTS, use_tqdm=False, instruction=TASK)]
    for i in (0, 2):
        assert [one["score"] for one in done[i]["data"]] == plain
    assert done[1]["data"] == [{"object": "score", "index": 0, "score": asked[0]}]
    assert done[0]["usage"]["prompt_tokens"] == done[0]["usage"]["total_tokens"] > 500
    order = sorted(range(5), key=lambda i: -plain[i])
    assert [one["index"] for one in done[3]["results"]] == order
    best = max(range(5), key=lambda i: asked[i])
    assert len(done[4]["results"]) == 2
    assert done[4]["results"][0] == {
        "index": best,
        "document": {"text": DOCUMENTS[best]},
        "relevance_score": asked[best],
    }
    messages = [result["error"]["error"]["message"] for result in results[5:]]
    wanted = [
        "data_2 must be a string",
        "query must be a string",
        "top_n must be at least 0",
        "unknown field of /v1/rerank 'document'; did you mean 'documents'?",
        "unknown field of /v1/score 'top_n'",
    ]
    for message, start in zip(messages, wanted, strict=True):
        assert message.startswith(start)


def test_named_log_probabilities(reranker: tuple[LLM, torch.nn.Module]) -> None:
    """They are in the logprobs of every token, also of samples and with drafts."""
    llm, model = reranker
    ids = [3, 900, 3, 0]
    fields = dict(temperature=1.2, seed=4, max_tokens=6, ignore_eos=True)
    params = [
        SamplingParams(n=2, logprob_token_ids=ids, **fields),
        SamplingParams(logprobs=2, **fields),
        SamplingParams(logprobs=1, logprob_token_ids=[7], presence_penalty=1.0, **fields),
        SamplingParams(**fields),
    ]
    prompts = [[5, 6, 7], [5, 6, 8], [9], [10]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        for sample in output.outputs:
            if p.logprobs is None and p.logprob_token_ids is None:
                assert sample.logprobs is None
                continue
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + sample.token_ids])).logits[0]
            for i, entry in enumerate(sample.logprobs):
                wanted = logits[len(prompt) + i - 1].log_softmax(dim=0)
                top = wanted.topk(p.logprobs or 0).indices.tolist()
                names = [sample.token_ids[i], *top, *(p.logprob_token_ids or [])]
                assert list(entry) == list(dict.fromkeys(names))
                for token, logprob in entry.items():
                    assert logprob.logprob == pytest.approx(wanted[token].item(), abs=1e-4)
                    assert logprob.rank == 1 + int((wanted > wanted[token]).sum())
            total = sum(
                e[t].logprob for t, e in zip(sample.token_ids, sample.logprobs, strict=True)
            )
            assert sample.cumulative_logprob == pytest.approx(total)
    drafting = random_llm(
        llm.engine.checkpoint.directory, speculative_config={"prompt_lookup_min": 1}
    )
    params[0] = SamplingParams(temperature=0, max_tokens=40, logprob_token_ids=ids, ignore_eos=True)
    wanted, found = (
        each.generate([[5, 6] * 9], params[0], use_tqdm=False)[0].outputs[0].logprobs
        for each in (llm, drafting)
    )
    assert drafting.stats()["accepted_tokens"] > 5
    found, wanted = (
        [[(t, p.logprob) for t, p in entry.items()] for entry in entries]
        for entries in (found, wanted)
    )
    assert found == wanted
    for value, kind in (
        ([-1], ValueError),
        (["a"], TypeError),
        (3, TypeError),
        ([1100], ValueError),
    ):
        with pytest.raises(kind, match="logprob_token_ids"):
            llm.generate([[1]], SamplingParams(logprob_token_ids=value), use_tqdm=False)
