"""Embeddings equal transformers', whatever the steps; layouts of checkpoints; pooling settings."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, edited, make_checkpoint, random_llm
from engines import EACH_WAY, still_serves
from safetensors.torch import load_file, save_file

from nanovllm import LLM, EmbeddingRequestOutput, PoolingParams, SamplingParams
from nanovllm.features.tasks.embeddings import check_embeddings, read_pooling_settings

LENGTHS = (40, 1, 17, 16, 33, 2, 64, 15)
PROMPTS = [[(7 * i + 3 * n) % VOCAB for i in range(n)] for n in LENGTHS]
PREFIX = [11] * 35
SHARED = [PREFIX + prompt for prompt in PROMPTS]


def reference(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    """transformers' last hidden state of the last token, after the final norm."""
    with torch.inference_mode():
        return model.model(torch.tensor([prompt])).last_hidden_state[0, -1]


def near(found: list[EmbeddingRequestOutput], model: torch.nn.Module, prompts: list) -> None:
    assert len(found) == len(prompts)
    for output, prompt in zip(found, prompts, strict=True):
        assert output.prompt_token_ids == prompt
        want = torch.nn.functional.normalize(reference(model, prompt), dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, atol=1e-4, rtol=0)


def change_layout(path: Path, layout: str) -> None:
    """Rewrite a saved Qwen3ForCausalLM as one of the layouts of Qwen3-Embedding."""
    if layout == "causal":
        return
    tensors = load_file(path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if "bare" in layout:
        tensors = {name.removeprefix("model."): t for name, t in tensors.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    if "Model" in layout:
        config = json.loads((path / "config.json").read_text())
        config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "Model")]
        (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("layout", ["causal", "without head", "bare", "bare Model", "Model"])
def test_layouts(tmp_path, layout: str, tie: bool) -> None:
    """Names with and without "model.", and heads that are tied, stored or missing."""
    model = make_checkpoint(tmp_path, tie=tie)
    change_layout(tmp_path, layout)
    llm = random_llm(tmp_path, runner="pooling")
    near(llm.embed(PROMPTS[:3], use_tqdm=False), model, PROMPTS[:3])
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    if tie or layout == "causal":
        with torch.inference_mode():
            want = model(torch.tensor(PROMPTS[:1])).logits[0, -1].argmax().item()
        assert llm.generate(PROMPTS[0], greedy, use_tqdm=False)[0]["token_ids"][0] == want
        return
    for call in (
        lambda: llm.generate(PROMPTS[0], greedy, use_tqdm=False),
        lambda: llm.loglikelihood(PROMPTS[0], [1], use_tqdm=False),
        lambda: llm.engine.add_request(PROMPTS[0], greedy),
    ):
        with pytest.raises(ValueError, match=r"no head \(lm_head.weight\).*use embed"):
            call()
    assert len(llm.embed(PROMPTS[0], use_tqdm=False)) == 1


@pytest.mark.parametrize("options", EACH_WAY, ids=str)
def test_equal_in_any_steps(
    checkpoint: tuple[Path, torch.nn.Module], options: dict[str, object]
) -> None:
    """Whole, in chunks, with prefix hits, preempted, in mixed lengths, planned ahead."""
    path, model = checkpoint
    llm = random_llm(path, **options)
    for prompts in (PROMPTS, SHARED, SHARED):
        near(llm.embed(prompts, use_tqdm=False), model, prompts)
    assert not llm.engine.scheduler.has_work()
    assert llm.stats()["blocks_in_use"] == 0
    assert llm.stats()["output_tokens"] == 0
    cached = [out.num_cached_tokens for out in llm.embed(SHARED, use_tqdm=False)]
    if options.get("enable_prefix_caching", True) and "num_kv_cache_blocks" not in options:
        assert all(n == (len(p) - 1) // 16 * 16 for n, p in zip(cached, SHARED, strict=True))


def test_preempted_requests_are_equal(checkpoint: tuple[Path, torch.nn.Module]) -> None:
    """Long outputs take the blocks of prompts that are computed in chunks at the same time."""
    path, model = checkpoint
    llm = random_llm(path, num_kv_cache_blocks=9, max_num_batched_tokens=10)
    engine, outputs = llm.engine, []
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    for prompt in PROMPTS:
        engine.add_request(prompt, PoolingParams(), request_id=f"e{len(prompt)}")
        engine.add_request(prompt[:3], params, request_id=f"g{len(prompt)}")
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert llm.stats()["preemptions"] > 0
    found = {out.request_id: out for out in outputs}
    near([found[f"e{len(p)}"] for p in PROMPTS], model, PROMPTS)


def test_fields(checkpoint: tuple[Path, torch.nn.Module], llm: LLM) -> None:
    raw = reference(checkpoint[1], PROMPTS[0])
    for fields, want in (
        ({"normalize": False}, raw),
        ({"dimensions": 10, "normalize": False}, raw[:10]),
        ({"dimensions": 10}, torch.nn.functional.normalize(raw[:10], dim=0)),
        ({"dimensions": 64}, torch.nn.functional.normalize(raw, dim=0)),
    ):
        for output in (
            llm.embed(PROMPTS[0], use_tqdm=False, **fields)[0],
            llm.embed(PROMPTS[:1], PoolingParams(**fields), use_tqdm=False)[0],
            llm.embed(PROMPTS[:2], [PoolingParams(**fields), PoolingParams()], use_tqdm=False)[0],
        ):
            found = torch.tensor(output.outputs.embedding)
            torch.testing.assert_close(found, want, atol=2e-4, rtol=1e-4)
    assert PoolingParams(use_activation=False) == PoolingParams(normalize=False)
    assert llm.embed([], use_tqdm=False) == []


def test_a_prompt_may_fill_the_model(llm: LLM) -> None:
    assert len(llm.embed([5] * 128, use_tqdm=False)) == 1
    with pytest.raises(ValueError, match="129 tokens, and may have 128 with"):
        llm.embed([5] * 129, use_tqdm=False)
    with pytest.raises(ValueError, match="may have 127 with max_model_len=128"):
        llm.generate([5] * 128, use_tqdm=False)


def test_nan_and_aborts_end_only_their_request(llm: LLM, monkeypatch, caplog) -> None:
    engine = llm.engine
    engine.add_request(PROMPTS[0], PoolingParams(), request_id="gone")
    engine.add_request(PROMPTS[1], PoolingParams(), request_id="kept")
    engine.abort_request("gone")
    assert [output.request_id for output in engine.step()] == ["kept"]
    run = engine.runner.run

    def with_nan(plan: object) -> object:
        output = run(plan)()
        next(iter(output.results.values())).hidden_state[3] = math.nan
        return lambda: output

    monkeypatch.setattr(engine.runner, "run", with_nan)
    with pytest.raises(ArithmeticError, match="the model computed NaN"):
        llm.embed(PROMPTS[:2], use_tqdm=False)
    engine.add_request(PROMPTS[0], PoolingParams(), request_id="nan")
    engine.add_request(PROMPTS[1], PoolingParams(), request_id="kept")
    found = {output.request_id: output.outputs.embedding for output in engine.step()}
    assert found["nan"] == []
    assert len(found["kept"]) == 64
    assert "request nan failed" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(engine.runner, "run", lambda plan: engine.abort_all() or run(plan))
    with pytest.raises(RuntimeError, match="another thread has aborted"):
        llm.embed(PROMPTS[:2], use_tqdm=False)
    monkeypatch.undo()
    assert not engine.scheduler.has_work()
    assert len(llm.embed(PROMPTS, use_tqdm=False)) == len(PROMPTS)


# ---- the settings of a sentence-transformers checkpoint ----

MODULES = "Transformer", "Pooling", "Normalize"
LAST = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}


def add_modules(path: Path, kinds: tuple[str, ...], pooling: dict, **settings: object) -> None:
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" * (i > 0),
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    "pooling", [LAST, {"pooling_mode": "lasttoken"}, {"pooling_mode": ["lasttoken"]}], ids=str
)
def test_settings_that_are_honoured(tmp_path, pooling: dict) -> None:
    model = make_checkpoint(tmp_path)
    add_modules(tmp_path, MODULES[:2], pooling, truncate_dim=8)
    llm = random_llm(tmp_path)
    found = llm.embed(PROMPTS[0], use_tqdm=False)[0].outputs.embedding
    want = reference(model, PROMPTS[0])
    torch.testing.assert_close(torch.tensor(found), want[:8], atol=2e-4, rtol=1e-4)
    found = llm.embed(PROMPTS[0], use_tqdm=False, normalize=True, dimensions=64)[0]
    assert math.hypot(*found.outputs.embedding) == pytest.approx(1)
    add_modules(tmp_path, MODULES, pooling)
    near(random_llm(tmp_path).embed(PROMPTS[:1], use_tqdm=False), model, PROMPTS[:1])


REFUSED = [
    (MODULES, {"pooling_mode_mean_tokens": True}, r"1_Pooling/config.json .* \['mean_tokens'\]"),
    (MODULES, {}, "'mean'"),
    (MODULES, {"pooling_mode": "cls"}, "'cls'"),
    (MODULES, LAST | {"pooling_mode_cls_token": True}, "'lasttoken', 'cls_token'"),
    ((*MODULES[:2], "Dense"), LAST, "modules Transformer, Pooling, Dense"),
    (MODULES[:1], LAST, "modules Transformer;"),
]


@pytest.mark.parametrize(("kinds", "pooling", "words"), REFUSED, ids=str)
def test_settings_that_are_refused(
    tmp_path, kinds: tuple[str, ...], pooling: dict, words: str
) -> None:
    make_checkpoint(tmp_path)
    add_modules(tmp_path, kinds, pooling)
    llm = random_llm(tmp_path)
    with pytest.raises(ValueError, match=f"no embeddings: .*{words}"):
        llm.embed(PROMPTS[0], use_tqdm=False)
    assert len(llm.generate(PROMPTS[0], use_tqdm=False)) == 1


@pytest.fixture(scope="session")
def with_prompts(tmp_path_factory) -> Path:
    """The embedded model as a sentence-transformers checkpoint."""
    path = tmp_path_factory.mktemp("prompts")
    source = Path(__file__).parents[3] / "nanovllm" / "loading" / "qwen3-nano"
    for file in source.iterdir():
        (path / file.name).symlink_to(file)
    prompts = {"query": "Instruct: find it\nQuery:", "document": ""}
    add_modules(path, MODULES, LAST | {"word_embedding_dimension": 256}, prompts=prompts)
    return path


def test_prompts_by_name(with_prompts: Path) -> None:
    llm = LLM(str(with_prompts), dtype="float32", device="cpu")
    tokenizer = llm.get_tokenizer()
    plain, query, document = (
        llm.embed("What is a block?", use_tqdm=False, prompt_name=name)[0]
        for name in (None, "query", "document")
    )
    assert plain.outputs.embedding == document.outputs.embedding  # with a prefix hit
    text = "Instruct: find it\nQuery:What is a block?"
    assert query.prompt_token_ids == tokenizer.encode(text)
    [again] = llm.embed({"prompt": text}, use_tqdm=False)
    assert again.outputs.embedding == query.outputs.embedding
    with pytest.raises(ValueError, match="no prompt named 'title'; it has 'query', 'document'"):
        llm.embed("x", use_tqdm=False, prompt_name="title")
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt_name='query' is prepended to text"):
        llm.embed(["x", [1]], use_tqdm=False, prompt_name="query")


@pytest.mark.parametrize("adds", [True, False])
def test_the_end_of_a_text(with_prompts: Path, tmp_path, adds: bool) -> None:
    """e5-mistral has add_eos_token, which its tokenizer.json does not apply."""
    for file in with_prompts.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").unlink()
    text = json.dumps(config | {"add_eos_token": adds})
    (tmp_path / "tokenizer_config.json").write_text(text)
    llm = LLM(str(tmp_path), dtype="float32", device="cpu")
    plain = llm.get_tokenizer().encode("a b")
    ended = plain + [1035] * adds
    prompts = ["a b", {"prompt": "a b<|im_end|>"}, plain]
    found = [out.prompt_token_ids for out in llm.embed(prompts, use_tqdm=False)]
    assert found == [ended, [*plain, 1035], plain]
    assert llm.generate("a b", use_tqdm=False)[0].prompt_token_ids == plain


def test_reading_of_texts(with_prompts: Path, tmp_path) -> None:
    """Fields of sentence_bert_config.json are followed or refused."""
    shutil.copytree(with_prompts, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "sentence_bert_config.json"
    file.write_text(json.dumps({"max_seq_length": 8, "do_lower_case": True}))
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", attention_backend="sdpa")
    found = llm.embed("What Is A", use_tqdm=False)[0].prompt_token_ids
    assert found == llm.get_tokenizer().encode("what is a")
    for prompt in ("a " * 9, [1] * 9):
        with pytest.raises(ValueError, match=r"has \d+ tokens, and .*max_seq_length=8; shorten"):
            llm.embed(prompt, use_tqdm=False)
    for name, value in (
        ("query_length", 9),
        ("modality_config", {"message": {}}),
        ("processing_kwargs", {"text": {"max_length": 3}}),
    ):
        file.write_text(json.dumps({"modality_config": {"text": {}}, name: value}))
        settings = read_pooling_settings(tmp_path, 256)
        with pytest.raises(ValueError, match=f"no embeddings: {name}={value} of .* not supported"):
            check_embeddings(tmp_path, settings)


@pytest.mark.slow
def test_equal_to_sentence_transformers(with_prompts: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    settings = {"dtype": torch.float32}
    theirs = library.SentenceTransformer(str(with_prompts), device="cpu", model_kwargs=settings)
    llm = LLM(str(with_prompts), dtype="float32", device="cpu", attention_backend="sdpa")
    texts = ["What is a block?", "Sort 3, 1, 2", "a", "Prefix sharing lets requests share blocks."]
    for name in ("query", "document"):
        want = theirs.encode(texts, prompt_name=name, convert_to_tensor=True)
        found = [
            out.outputs.embedding for out in llm.embed(texts, use_tqdm=False, prompt_name=name)
        ]
        torch.testing.assert_close(torch.tensor(found), want, atol=1e-4, rtol=0)


POOLING = [
    ({"dimensions": 65}, ValueError, "dimensions=65 is more than the 64 of the model"),
    ({"normalize": True, "use_activation": False}, ValueError, "two names of one field"),
    ({"prompt_name": "query"}, ValueError, "no prompt named 'query'; it has none"),
    ({"dimension": 3}, TypeError, "dimension"),
]


@pytest.mark.parametrize(("fields", "error", "word"), POOLING, ids=str)
def test_pooling_params(small_llm: LLM, fields: dict, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        small_llm.embed([[1]], PoolingParams(**fields), use_tqdm=False)
    if "use_activation" not in fields:
        with pytest.raises(error, match=word):
            small_llm.embed([[1]], use_tqdm=False, **fields)
    still_serves(small_llm)


SETTINGS = [
    ("modules.json", "{}", "modules.json is not valid: it must hold a list, not dict"),
    ("modules.json", "[3]", "the module 3 has no 'type'"),
    ("modules.json", "[", "modules.json is not valid JSON"),
    ("config_sentence_transformers.json", "[]", "it must hold an object, not list"),
    ("config_sentence_transformers.json", '{"prompts": []}', "prompts must be an object"),
    ("config_sentence_transformers.json", '{"prompts": {"a": 3}}', "a prompt must be a string"),
    ("config_sentence_transformers.json", '{"truncate_dim": 0}', "truncate_dim must be"),
    ("config_sentence_transformers.json", '{"default_prompt_name": "a"}', "is none of the prompts"),
]


@pytest.mark.parametrize(("name", "text", "word"), SETTINGS)
def test_broken_pooling_settings(path: Path, tmp_path, name: str, text: str, word: str) -> None:
    edited(path, tmp_path)
    (tmp_path / name).write_text(text)
    llm = random_llm(tmp_path)
    with pytest.raises(ValueError, match=word):
        llm.embed([[1]], use_tqdm=False)
