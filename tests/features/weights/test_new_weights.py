"""An engine with new weights equals a new engine of them, and transformers' model."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fresh
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, random_llm
from weights import MODELS, OPTIONS, PARAMS, WIDE, Pair, answers, logprobs_of, pair

from nanovllm import LLM, GenerationError


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], Pair]:
    """Returns the pair of a kind, which is made once."""
    return functools.cache(lambda kind: pair(kind, tmp_path_factory.mktemp("pair")))


# In bfloat16, and in torch, weights of all kinds are stored as in float32.
CASES = [
    (kind, options)
    for kind in MODELS
    for options in OPTIONS
    if kind == "qwen3" or options not in ("bfloat16", "torch")
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_new_weights_are_a_new_engine(
    kind: str, options: str, models: Callable[[str], Pair]
) -> None:
    """From each source, and back, with a prefix cache that is full of the other weights' blocks."""
    (old_path, old), (new_path, new) = models(kind)
    llm = random_llm(old_path, num_kv_cache_blocks=20, **OPTIONS[options])
    before, (tokens, logprobs) = answers(llm), answers(random_llm(new_path, **OPTIONS[options]))
    assert before[0] != tokens
    if options in ("float32", "torch"):
        torch.testing.assert_close(logprobs, logprobs_of(new, tokens), atol=1e-4, rtol=1e-4)
    sources = {
        "a generator": lambda model, path: model.named_parameters(),
        "a state_dict": lambda model, path: model.state_dict(),
        "a directory": lambda model, path: path,
        "in any order": lambda model, path: sorted(model.state_dict().items(), reverse=True),
    }
    for source, of in sources.items():
        for model, path, wanted in (new, new_path, (tokens, logprobs)), (old, old_path, before):
            llm.load_weights(of(model, path))
            assert llm.stats()["blocks_evictable"] == 0
            found = answers(llm)
            assert found[0] == wanted[0], source
            assert torch.equal(found[1], wanted[1])


# ---- what is refused ----


@pytest.fixture
def old_and_new(models: Callable[[str], Pair]) -> Iterator[tuple[LLM, Any, Any]]:
    """An engine, its state_dict, and another one. In the end it answers as it did first."""
    (old_path, old), (_, new) = models("qwen3")
    llm = random_llm(old_path)
    before = answers(llm)
    yield llm, old.state_dict(), new.state_dict()
    assert answers(llm)[0] == before[0]


def without(weights: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if name not in names}


def test_all_differences_in_one_error(old_and_new: tuple[LLM, Any, Any]) -> None:
    """Nothing is changed: the prefix cache is still full."""
    llm, _, new = old_and_new
    wrong = without(new, "model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    wrong |= {"model.head": torch.zeros(2), "model.layers.0.mlp.down_proj.weight": torch.zeros(3)}
    wrong["model.embed_tokens.weight"] = new["model.embed_tokens.weight"].long()
    message = (
        "the argument of load_weights does not fit config.json; missing: model.layers.1.mlp.up_proj"
        ".weight, model.norm.weight; unexpected: model.head; misshapen: model.embed_tokens.weight "
        "is (199, 128) of torch.int64, expected (199, 128) of BF16, F16, F32, F64, model.layers.0."
        "mlp.down_proj.weight is (3,) of F32"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        llm.load_weights(wrong)
    with pytest.raises(ValueError, match="unexpected: model.head; misshapen"):
        llm.load_weights(wrong, partial=True)
    assert llm.stats()["blocks_evictable"] > 0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": np.zeros(2)}, "pairs of a name and a torch.Tensor, not ndarray with the name a"),
        (["a", "b"], "not str with the name None"),
        ([torch.zeros(2)], "not Tensor with the name None"),
        ([(torch.zeros(2), "a")], "not str with the name tensor"),
        (5, "not int"),
        (torch.nn.Linear(1, 1), "model.state_dict(), or pairs of a name and a torch.Tensor, not"),
    ],
)
def test_wrong_types(old_and_new: tuple[LLM, Any, Any], weights: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        old_and_new[0].load_weights(weights)
    with pytest.raises(TypeError, match="partial must be True or False, not 'yes'"):
        old_and_new[0].load_weights({}, partial="yes")
    assert old_and_new[0].stats()["blocks_evictable"] > 0


def test_other_directories(old_and_new: tuple[LLM, Any, Any], tmp_path) -> None:
    llm = old_and_new[0]
    make_checkpoint(tmp_path, num_hidden_layers=3, **WIDE)
    with pytest.raises(
        ValueError, match="is another model than .*: they differ in num_layers, windows; make"
    ):
        llm.load_weights(tmp_path)
    for missing in (str(tmp_path / "missing"), "~nobody-here/missing"):
        with pytest.raises(ValueError, match="there is no directory '.*missing'"):
            llm.load_weights(missing)
    (tmp_path / "model.safetensors").unlink()
    make_checkpoint(tmp_path, **WIDE)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="readable safetensors file"):
        llm.load_weights(tmp_path)


@pytest.mark.parametrize("error", [OSError("the end of the file"), KeyboardInterrupt()])
def test_an_error_in_the_middle(old_and_new: tuple[LLM, Any, Any], error: BaseException) -> None:
    """All calls are refused until all weights are loaded."""
    llm, old, new = old_and_new

    def some() -> Iterator[tuple[str, torch.Tensor]]:
        yield from [*new.items()][:7]
        raise error

    with pytest.raises(type(error)):
        llm.load_weights(some())
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([[1, 2]]),
        lambda: [*llm.stream([[1, 2]])],
        lambda: llm.embed([[1, 2]]),
        lambda: llm.loglikelihood([[1, 2]], [[3]]),
        lambda: llm.engine.add_request([1, 2]),
        lambda: llm.save_prefix_cache("nowhere"),
    ]
    for change in (lambda: None, lambda: llm.load_weights(without(old, "model.norm.weight"), True)):
        change()
        for call in calls:
            with pytest.raises(RuntimeError, match="the weights are incomplete"):
                call()
    with pytest.raises(ValueError, match="missing: model.norm.weight"):
        llm.load_weights(without(old, "model.norm.weight"))
    with pytest.raises(ValueError, match="missing: model.norm.weight"):
        llm.load_weights(iter(without(old, "model.norm.weight").items()))
    with pytest.raises(RuntimeError, match="the weights are incomplete"):
        llm.generate([[1, 2]])
    llm.load_weights(old)


def test_requests_that_run(old_and_new: tuple[LLM, Any, Any]) -> None:
    llm, _, new = old_and_new
    stream = llm.stream([[1, 2, 3]], PARAMS)
    next(stream)
    with pytest.raises(
        RuntimeError, match="weights cannot be saved, loaded or freed while requests run"
    ):
        llm.load_weights(new)
    stream.close()


def test_some_weights(models: Callable[[str], Pair]) -> None:
    """One projection of a packed weight, then the others of the model."""
    (path, old), (new_path, new) = models("qwen3")
    llm = random_llm(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    llm.load_weights({name: new.state_dict()[name]}, partial=True)
    with torch.no_grad():
        tokens, logprobs = answers(llm)
        kept = old.state_dict()[name].clone()
        old.state_dict()[name].copy_(new.state_dict()[name])
        torch.testing.assert_close(logprobs, logprobs_of(old, tokens), atol=1e-4, rtol=1e-4)
        old.state_dict()[name].copy_(kept)
    llm.load_weights(iter(without(new.state_dict(), name).items()), partial=True)
    assert answers(llm)[0] == answers(random_llm(new_path))[0]


def test_parts_that_are_complete_together(old_and_new: tuple[LLM, Any, Any]) -> None:
    """After sleep, and after an error in one of the parts."""
    llm, old, _ = old_and_new
    llm.sleep(2)
    llm.wake_up()
    names = sorted(old)
    parts = [{name: old[name] for name in names[i::3]} for i in range(3)]
    llm.load_weights(parts[0], partial=True)
    failing = [*parts[1].items(), ("no tensor", torch.zeros(1))]
    with pytest.raises(ValueError, match="unexpected: no tensor"):
        llm.load_weights(iter(failing), partial=True)
    for part in parts[1:]:
        with pytest.raises(RuntimeError, match="the weights are incomplete"):
            llm.generate([[1, 2]])
        llm.load_weights(iter(part.items()), partial=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes(models: Callable[[str], Pair], dtype: torch.dtype) -> None:
    (path, _), (_, new) = models("qwen3")
    llm = random_llm(path)
    llm.load_weights({name: tensor.to(dtype) for name, tensor in new.state_dict().items()})
    found = answers(llm)
    llm.load_weights({name: tensor.to(dtype).float() for name, tensor in new.state_dict().items()})
    assert answers(llm)[0] == found[0]


def test_a_head_that_the_engine_does_not_have(models: Callable[[str], Pair]) -> None:
    (path, _), (_, new) = models("tied")
    llm, weights = random_llm(path), new.state_dict()
    for form in (dict, lambda pairs: iter(pairs.items())):
        with pytest.raises(ValueError, match="lm_head.weight differs from the embeddings"):
            llm.load_weights(form(weights | {"lm_head.weight": 2 * weights["lm_head.weight"]}))
        # Values are not checked.
        nan = {"model.embed_tokens.weight", "lm_head.weight"}
        llm.load_weights(form({n: w * math.nan if n in nan else w for n, w in weights.items()}))
        with pytest.raises(GenerationError, match="NaN"):
            llm.generate([[1, 2]], use_tqdm=False)
        llm.load_weights(form(weights))


def test_the_prefix_cache_on_disk(models: Callable[[str], Pair], tmp_path) -> None:
    (path, _), (new_path, new) = models("qwen3")
    llm = random_llm(path)
    answers(llm)
    llm.save_prefix_cache(tmp_path)
    llm.load_weights(new.state_dict())
    answers(llm)
    for call in (llm.save_prefix_cache, llm.load_prefix_cache):
        with pytest.raises(ValueError, match=r"not a checkpoint's; call load_weights\(DIRECTORY\)"):
            call(tmp_path)
    llm.load_weights(new_path)
    with pytest.raises(
        ValueError, match="does not fit this engine: they differ in model .*, weights"
    ):
        llm.load_prefix_cache(tmp_path)
    llm.load_weights(path)
    assert llm.load_prefix_cache(tmp_path) > 0


MEMORY = """
from pathlib import Path
from statistics import median
import torch
from safetensors import safe_open
from nanovllm import LLM, SamplingParams
options = dict(device="cpu", dtype="float32", skip_tokenizer_init=True, num_kv_cache_blocks=20)
llm, shapes = LLM({path!r}, **options), {{}}
for file in Path({path!r}).glob("*.safetensors"):
    with safe_open(file, "pt") as open_file:
        shapes |= {{name: open_file.get_slice(name).get_shape() for name in open_file.keys()}}
def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))
resident, more = [], []
for i in range(50):
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before = memory("VmRSS")
    llm.load_weights(
        (name, torch.full(shape, i / 50, dtype=torch.bfloat16)) for name, shape in shapes.items()
    )
    resident.append(memory("VmRSS"))
    more.append(memory("VmHWM") - before)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
size = sum(torch.Size(shape).numel() * 4 for shape in shapes.values())
# Single values differ by what malloc keeps at that time.
print((median(resident[-20:]) - median(resident[:20])) / size, max(more) / size)
"""


@pytest.mark.slow
def test_memory_does_not_grow(large: Path) -> None:
    """In 50 hand-overs. Each takes some more for a time: two copies of the largest weight."""
    done = fresh.run(MEMORY.format(path=str(large)))
    assert done.returncode == 0, done.stderr
    growth, more = map(float, done.stdout.split())
    assert growth < 0.1
    assert more < 0.8
