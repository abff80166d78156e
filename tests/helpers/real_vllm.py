"""What the tests against the real vLLM share. Everything is float32, so that equal means equal."""
import dataclasses
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from conftest import build_tokenizer, counting_page, tiny_lm

import lm
import recipe
from helpers.scores import score

os.environ.setdefault("HF_HUB_OFFLINE", "1")
MARKS = [pytest.mark.vllm,
         pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")]
SERVER = recipe.ServerConfig(tensor_parallel=1, kv_cache_gb=0.06, dtype="float32", eager=True,
                             start_minutes=20, restarts=2)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A random model with a generation_config.json like Llama-3.1-Instruct's: more end tokens, a temperature,
    a top_p. A sampler that reads it ends turns at quotes, and its log-probs are not the model's."""
    copied = tmp_path_factory.mktemp("model") / "base"
    lm.save(tiny_lm(build_tokenizer()), copied)
    quote = lm.load(copied).tokenizer("'", add_special_tokens=False).input_ids
    misleading = {"eos_token_id": [3, *quote], "temperature": 0.6, "top_p": 0.5, "do_sample": True}
    (copied / "generation_config.json").write_text(json.dumps(misleading))
    return copied


@pytest.fixture(scope="session")
def model(folder) -> lm.LM:
    return dataclasses.replace(lm.load(folder), compute=torch.float32)


@pytest.fixture(scope="session")
def prompts(model) -> list[list[int]]:
    """Ten questions about pages, some longer than a block of keys and values (128 tokens on a CPU): a batch
    whose rows end at many lengths."""
    asked = [counting_page(n) + "\nWhat follows?" * n for n in range(0, 40, 4)]
    found = [model.template.prompt_ids([{"role": "user", "content": text}]) for text in asked]
    assert min(map(len, found)) < 128 < max(map(len, found))
    return found


def gap(model: lm.LM, prompts, samples, temperature: float) -> float:
    """The largest difference between a sampled token's log-prob as it was given and as the model scores
    it."""
    scored = score(model, [(prompt, sample.ids) for prompt, sample in zip(prompts, samples)], temperature)
    given = [torch.tensor(sample.logps) for sample in samples]
    return max(float((a - b).abs().max()) for a, b in zip(given, scored))
