"""The example of docs/rl.md: samples of the engine are scored right, and the reward rises."""

import random
import re
from typing import Any

import pytest
import torch

from nanovllm import LLM
from tools import rl


def test_scores_after_a_hand_over() -> None:
    """Engine and trainer agree about each token, with the first weights and with later ones."""
    llm = LLM(dtype="float32", attention_backend="sdpa")
    model: Any = rl.AutoModelForCausalLM.from_pretrained(rl.CHECKPOINT, dtype="float32")
    for _ in range(2):
        samples, reward = rl.rollouts(llm, random.Random(1), 4, seed=1)
        with torch.no_grad():
            trainer, engine, advantages = rl.score(model, samples)
            assert len(samples) == 4 * rl.SAMPLES
            assert len(trainer) == sum(len(output) for _, output, *_ in samples)
            torch.testing.assert_close(trainer, engine, rtol=0, atol=1e-3)
            assert engine.min() < -0.01
            of_samples = torch.tensor([sample[3] for sample in samples]).view(4, -1)
            assert of_samples.sum(dim=1).abs().max() < 1e-6
            assert set(advantages.tolist()) == set(of_samples.flatten().tolist())
            assert 0 < reward < 1
            for parameter in model.parameters():
                parameter += 0.003 * torch.randn_like(parameter)
        llm.load_weights(model.named_parameters())


def test_the_test_has_no_question_of_the_training() -> None:
    asked = [set(rl.questions(random.Random(1), 200, test)[1]) for test in (False, True)]
    assert len(asked[0]) == len(asked[1]) == 200
    assert not asked[0] & asked[1]


@pytest.mark.slow
def test_the_reward_rises(capsys) -> None:
    rl.train(seed=3, steps=4, dtype="float32")
    printed = capsys.readouterr().out
    before, after = map(float, re.findall(r"([\d.]+)%", printed))
    assert 40 < before < 45
    assert after > before + 10
    assert printed.count("step") == 4
