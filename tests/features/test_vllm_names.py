"""Names, arguments and options of vLLM: accepted where they change nothing, or explained."""

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.features.vllm_names import CALL_ARGUMENTS, INSTEAD, VLLM_OPTIONS
from nanovllm.inputs import CallArguments
from nanovllm.llm import engine_config

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_names_of_vllm_say_what_to_use(embedded: LLM) -> None:
    for name, sentence in INSTEAD.items():
        assert not hasattr(embedded, name)
        assert not hasattr(nanovllm, name)
        assert getattr(nanovllm, name, None) is None
        with pytest.raises(AttributeError) as attribute:
            getattr(embedded, name)
        with pytest.raises(AttributeError) as of_module:
            getattr(nanovllm, name)
        with pytest.raises(ImportError) as imported:
            exec(f"from nanovllm import LLM, {name}")
        for error in (attribute, of_module, imported):
            assert str(error.value).endswith(f"has no attribute {name!r}; {sentence}")
    assert not INSTEAD.keys() & {*dir(LLM), *nanovllm.__all__}
    assert embedded.llm_engine is embedded.engine


def test_other_names_have_the_nearest_one(embedded: LLM) -> None:
    for name, near in (("generat", "generate"), ("engin", "engine"), ("llm_engines", "llm_engine")):
        with pytest.raises(AttributeError) as error:
            getattr(embedded, name)
        shown = traceback.format_exception(error.value)[-1]
        assert shown.count(f"'{name}'; did you mean '{near}'?") == 1
        assert shown.lower().count("did you mean") == 1  # Python adds none of its own
    with pytest.raises(AttributeError, match="LLM has no attribute 'zzz'$"):
        _ = embedded.zzz
    with pytest.raises(AttributeError, match="'SamplingParam'; did you mean 'SamplingParams'"):
        _ = nanovllm.SamplingParam
    with pytest.raises(ImportError, match="cannot import name 'zzz'"):
        exec("from nanovllm import zzz")
    exec("from nanovllm import llm, plan")  # submodules


def test_arguments_of_vllm_that_change_nothing(embedded: LLM) -> None:
    def generate(**arguments: object) -> str:
        return embedded.generate("Spell cat\n", GREEDY, use_tqdm=False, **arguments)[0]["text"]

    def chat(**arguments: object) -> str:
        chat = [{"role": "user", "content": "Spell cat"}]
        return embedded.chat(chat, GREEDY, use_tqdm=False, **arguments)[0]["text"]

    for call in (generate, chat):
        assert call(**dict.fromkeys(CALL_ARGUMENTS)) == "c-a-t"
        for name, (harmless, reason) in CALL_ARGUMENTS.items():
            assert all(call(**{name: value}) == "c-a-t" for value in harmless)
            for value in (7, "some", [1, 2], np.array([0, 0]), False):
                with pytest.raises(ValueError, match=re.escape(reason)):
                    call(**{name: value})
        with pytest.raises(TypeError, match=f"of {call.__name__} 'use_tqmd'.*'use_tqdm'"):
            call(use_tqmd=False)
        with pytest.raises(TypeError, match=r"'lora'; known: \w+, sampling_params, use_tqdm"):
            call(lora=None)
        for zeros in ([0, 0], (0,), []):
            assert call(priority=zeros, lora_request=[None] * len(zeros)) == "c-a-t"
        for name, value in (("priority", [0, 1]), ("priority", [[0]]), ("lora_request", [None, 1])):
            with pytest.raises(ValueError, match=f"{name}=.* is not supported"):
                call(**{name: value})
    with pytest.raises(ValueError, match="pass the token ids as `prompts`"):
        embedded.generate(prompt_token_ids=[[1, 2]], sampling_params=GREEDY)
    with pytest.raises(TypeError, match="prompts must be a string"):
        embedded.generate()
    assert CallArguments.__annotations__.keys() == CALL_ARGUMENTS.keys()


@pytest.mark.slow
@pytest.mark.extra
def test_type_checkers_see_the_names(tmp_path: Path) -> None:
    """mypy --strict accepts what exists and refuses every other name."""
    pytest.importorskip("mypy")
    good = """from pathlib import Path
from nanovllm import LLM, SamplingParams, TextPrompt, TokensPrompt
from nanovllm.engine.llm_engine import LLMEngine
llm = LLM()
other = LLM(model=Path("a"), max_num_seqs=4, async_scheduling=None)
engine: LLMEngine = llm.llm_engine
prompts = [TokensPrompt(prompt_token_ids=[1, 2])]
outputs = llm.generate(prompts, SamplingParams(), lora_request=None, priority=0)
text: str = outputs[0].outputs[0].text
llm.generate(prompts, priority=[0], lora_request=[None])
llm.generate([TextPrompt(prompt="a")], use_tqdm=False)
llm.chat([{"role": "user", "content": "a"}], chat_template_content_format="auto")
params: SamplingParams = SamplingParams.from_optional(n=None).clone()
engine.abort_request(["0"])
"""
    bad = """from nanovllm import LLM, EngineArgs
llm = LLM()
llm.encode
llm.generate("a", use_tqmd=False)
llm.generate("a", priority=3)
LLM(max_num_seq=4)
LLM("a", "cpu")
LLM(max_num_seqs="4")
"""
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\nfollow_imports = silent\n"
        "[mypy-torch.*,transformers.*,numpy.*,numba.*,tqdm.*]\nfollow_imports = skip\n"
    )
    for name, code in (("good.py", good), ("bad.py", bad)):
        (tmp_path / name).write_text(code)
    command = [sys.executable, "-m", "mypy", "good.py", "bad.py"]
    environment = os.environ | {"MYPYPATH": str(Path(nanovllm.__file__).parent.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    found = re.findall(r"^(\S+):(\d+): error", done.stdout, re.MULTILINE)
    assert found == [("bad.py", line) for line in "1345678"], done.stdout
    assert done.returncode == 1, done.stdout


def test_options_of_vllm_that_change_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """None and the listed values of each are accepted, with a line for those who debug."""
    with caplog.at_level("DEBUG", logger="nanovllm"):
        for name, (harmless, reason) in VLLM_OPTIONS.items():
            assert engine_config({name: None}) == EngineConfig()
            for value in harmless if reason else (False, 7, "any"):
                assert engine_config({name: value}) == EngineConfig()
                assert f"{name}={value!r}" in caplog.messages[-1]
            if reason:
                with pytest.raises(ValueError, match=re.escape(f"{name}='other' is not")):
                    engine_config({name: "other"})
    assert not VLLM_OPTIONS.keys() & EngineConfig.__dataclass_fields__.keys()


@pytest.mark.parametrize("value", [np.array([1, 2]), np.array([]), torch.ones(2), [np.ones(2)]])
@pytest.mark.parametrize("option", ["rope_scaling", "logits_processors"])
def test_arrays_as_options(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option}=.* is not supported"):
        engine_config({option: value})


@pytest.mark.parametrize("method", ["awq", "gptq_marlin", "fp8"])
def test_the_format_of_a_checkpoint(method: str) -> None:
    with pytest.raises(
        ValueError, match=f"quantization='{method}' is not needed: the format.*'int8'"
    ):
        LLM(quantization=method)
