"""The model of lm_eval gives the figures of lm_eval's own model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm import SamplingParams
from tools.training.data import graded_samples

TASKS = {
    "demo_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "demo_answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 32, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "demo_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


def write_tasks(path: Path, num_docs: int) -> None:
    """Tasks of lm_eval on the questions that the embedded model was trained to answer."""
    samples = [s for task in ("add", "sort", "spell", "reverse") for s in graded_samples(task, 99)]
    samples = samples[:: len(samples) // num_docs][:num_docs]
    docs = [{"question": s.question + "\n", "answer": s.answer} for s in samples]
    for i, doc in enumerate(docs):
        others = [docs[(i + k) % num_docs]["answer"] for k in (1, 2, 3)]
        doc["label"] = i % 4
        doc["choices"] = [*others[: i % 4], doc["answer"], *others[i % 4 :]]
        doc["text"] = " ".join(d["answer"] for d in docs[max(0, i - 5 * (i % 3)) : i + 1])
    (path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, task in TASKS.items():
        data = {"data_files": str(path / "docs.jsonl")}
        settings = {"task": name, "dataset_path": "json", "dataset_kwargs": data}
        settings |= {"test_split": "train", **task}
        (path / f"{name}.yaml").write_text(json.dumps(settings))  # JSON is YAML


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is not missing")
def test_a_device_that_lm_eval_asks_for(caplog) -> None:
    """Its command passes cuda:0 by default, which may also be what the user asks for."""
    pytest.importorskip("lm_eval")
    from nanovllm.cli.jobs.lm_eval import NanoVLLM

    for device in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match="needs a GPU, and torch finds none"):
            NanoVLLM(device=device, num_kv_cache_blocks=8)
    assert NanoVLLM(device="cuda:0", num_kv_cache_blocks=8).llm.engine.runner.device.type == "cpu"
    assert "torch finds no GPU for cuda:0" in caplog.text


def test_a_continuation_that_leaves_no_room_for_its_prompt() -> None:
    pytest.importorskip("lm_eval")
    from nanovllm.cli.jobs.lm_eval import NanoVLLM

    model = NanoVLLM(max_model_len=8, num_kv_cache_blocks=8)
    ids = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    score = model._loglikelihood_tokens([(None, ids, ids[:8])], True)
    assert score == model._loglikelihood_tokens([(None, ids[-1:], ids[:8])], True)
    for length in (9, 10):
        with pytest.raises(ValueError, match=f"^{length} tokens after a prompt leave no"):
            model._loglikelihood_tokens([(None, ids, ids[:length])], True)


def test_thinking() -> None:
    """The answer begins after the marker; only there, `until` ends it. As in lm_eval's models."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.utils import postprocess_generated_text

    from nanovllm.cli.jobs.lm_eval import NanoVLLM

    options = dict(num_kv_cache_blocks=32, dtype="float32", attention_backend="sdpa")
    with pytest.raises(ValueError, match="enable_thinking=True needs think_end_token"):
        NanoVLLM(enable_thinking=True, **options)
    chat = [{"role": "user", "content": "What is 2 + 3?"}]
    off = NanoVLLM(enable_thinking=False, **options)
    assert off.apply_chat_template(chat).endswith("<think>\n\n</think>\n\n")
    named = NanoVLLM(chat_template_args={"enable_thinking": False}, **options)
    assert named.apply_chat_template(chat) == off.apply_chat_template(chat)
    settings = {
        "until": ["\n"],
        "max_gen_toks": 16,
        "logit_bias": {1037: 8},
        "repetition_penalty": 9,
    }
    request = Instance("generate_until", {}, ("What is 2 + 3?\n", settings), 0)
    for marker in ("</think>", "1037", 1037):
        model = NanoVLLM(enable_thinking=True, think_end_token=marker, **options)
        assert not model.apply_chat_template(chat).endswith("</think>\n\n")
        with pytest.raises(ValueError, match="is for tasks that generate text"):
            model._loglikelihood_tokens([(None, [5], [6])], True)
        params = SamplingParams(
            temperature=0, max_tokens=16, logit_bias={1037: 8}, repetition_penalty=9
        )
        whole = model.llm.generate("What is 2 + 3?\n", params, use_tqdm=False)[0].outputs[0].text
        assert "</think>" in whole
        wanted = postprocess_generated_text(whole, ["\n"], "</think>")
        assert model.generate_until([request], True) == [wanted] != [whole]


@pytest.mark.slow
def test_lm_eval_gives_the_figures_of_its_own_model(tmp_path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    from lm_eval.tasks import TaskManager

    import nanovllm.cli.jobs.lm_eval  # noqa: F401  (registers the model)

    write_tasks(tmp_path, 24)
    path = str(Path(__file__).parents[3] / "nanovllm" / "loading" / "qwen3-nano")
    found = []
    for model, args in (
        ("hf", {"pretrained": path, "dtype": "float32"}),
        ("nanovllm", {"model": path, "dtype": "float32", "attention_backend": "sdpa"}),
    ):
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        results = lm_eval.simple_evaluate(
            model=model,
            model_args=args,
            tasks=list(TASKS),
            task_manager=manager,
            device="cpu",
            batch_size=8,
            bootstrap_iters=0,
            log_samples=True,
        )
        found.append(results)
    hf, ours = found
    for task in TASKS:
        figures = [
            {name: x for name, x in run["results"][task].items() if isinstance(x, float)}
            for run in found
        ]
        assert len(figures[0]) >= len(TASKS[task]["metric_list"])
        assert figures[1] == pytest.approx(figures[0], rel=1e-4), task
        for a, b in zip(ours["samples"][task], hf["samples"][task], strict=True):
            assert a["arguments"] == b["arguments"]
            for x, y in zip(a["resps"], b["resps"], strict=True):
                if task == "demo_answer":
                    assert x == y
                elif task == "demo_choice":
                    assert x[0][0] == pytest.approx(y[0][0], abs=1e-3)
                    assert x[0][1] == y[0][1]
                else:
                    assert x[0] == pytest.approx(y[0], abs=1e-2)


@pytest.mark.slow
def test_lm_evals_command_knows_the_model(tmp_path) -> None:
    pytest.importorskip("lm_eval")
    write_tasks(tmp_path, 8)
    options = "--model nanovllm --model_args model=qwen3-nano,attention_backend=sdpa --device cpu"
    command = [sys.executable, "-m", "nanovllm", "lm-eval", "run", *options.split()]
    command += ["--include_path", str(tmp_path), "--tasks", "demo_choice"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo_choice" in done.stdout
