"""Claims about evaluate.py with the real vLLM: whoever samples, a folder does the same on real pages."""
import functools
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import build_tokenizer, tiny_lm
from helpers.real_vllm import MARKS, SERVER

import data
import evaluate
import finetune
import lm
import measure
import policy
import recipe
import remote
from node import engine
from node import server as servers

pytestmark = MARKS
TASK, SEEDS = "enter-text", "1000000:4"
LENGTHS = {"context": 700, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> Path:
    """A clone of ten demonstrations. It types, and presses Submit; whether it gets the text right matters to
    nobody here."""
    recorded = data.read_trajectories(recipe.RECORDED)
    shown = finetune.successes([t for t in recorded if t.task == TASK], 10)
    model = tiny_lm(build_tokenizer(), context=700)
    pairs = policy.examples(model, shown, Counter())
    finetune.fit(model, pairs, finetune.FineTune(epochs=30, lr=3e-3, tokens=2048))
    folder = tmp_path_factory.mktemp("agent") / "clone"
    lm.save(model, folder)
    return folder


def test_transformers_vllm_and_a_chat_url_do_the_same_on_real_pages(agent, monkeypatch, tmp_path):
    """Guards: an agent whose success depends on who samples: a lost token, another end of turn. Greedy, in
    float32. (What is sent to a URL: tests/test_evaluate.py.) And a page longer than the server's context: it
    must not end an evaluation."""
    monkeypatch.setattr(engine, "Engine", functools.partial(engine.Engine, dtype="float32"))
    monkeypatch.setattr(lm, "load", functools.partial(lm.load, compute=torch.float32))
    played, success = [], measure.success
    monkeypatch.setattr(measure, "success", lambda trajectories: played.append(trajectories)
                        or success(trajectories))
    small = recipe.EngineConfig(kv_cache_gb=0.06, eager=True)
    common = {"tasks": (TASK,), "seeds": SEEDS, **LENGTHS}
    evaluate.run(evaluate.Config(checkpoint=str(agent), **common))
    evaluate.run(evaluate.Config(checkpoint=str(agent), sampler="vllm", engine=small, **common))
    server = servers.Server(agent, 700, SERVER, tmp_path / "log.txt")
    try:
        url = {"agent_url": f"{server.url}/v1", "agent_model": agent.name}
        evaluate.run(evaluate.Config(**url, **common))
        said = [[[(step.thought, str(step.action)) for step in t.steps] for t in trajectories]
                for trajectories in played]
        assert said[0] == said[1] == said[2]
        assert all(len(steps) >= 2 for steps in said[0]) and len({str(steps) for steps in said[0]}) == 4
        rewards = [[t.reward for t in trajectories] for trajectories in played]
        assert rewards[0] == rewards[1] == rewards[2]
        with pytest.raises(remote.EngineError, match="refuses to answer as 'no'.*does not exist"):
            evaluate.run(evaluate.Config(**url | {"agent_model": "no"}, **common))
        chat, long = remote.Chat(url["agent_url"], agent.name), "[1] link 'so' " * 200
        both = [[{"role": "user", "content": text}] for text in ("[1] link 'so'", long)]
        assert [sample.truncated for sample in lm.sample(chat, both, 1, 0.0, seed=0)] == [True, True]
        assert len(chat.refused) == 1 and "700" in chat.refused[0]
    finally:
        server.stop()
