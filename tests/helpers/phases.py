"""Small runs of rivals/webrl.py in the counting web."""

import dataclasses
import json

import dream
import lm
from helpers.runs import tiny_run
from rivals import webrl


def phases_run(folder, taught, rewarder, **more) -> webrl.Config:
    """The config of three phases in the counting web; writes what they learn from."""
    run = tiny_run(folder, taught)
    dreaming = dream.Config(horizon=3, max_new_tokens=16, world_model_tokens=48, judge_tokens=0,
                            temperature=1.0)
    config = webrl.Config(
        **{name: getattr(run, name) for name in (
            "policy", "world_model", "out", "trajectories", "lr", "tokens", "context", "evaluate_seeds",
            "world_model_context", "judge_context",
            "evaluate_horizon", "sampler")},
        judge_model=str(rewarder), updates=3, goals=6, batch=4, evaluate_every=0, checkpoint_every=1,
        drop_limit=1.0, compute="float32", dreaming=dreaming)
    return dataclasses.replace(config, **more)


def lines(config) -> list[dict]:
    text = open(f"{config.out}.run/metrics.jsonl").read()
    return [{name: value for name, value in json.loads(line).items() if "seconds" not in name}
            for line in text.splitlines() if "kept" in json.loads(line)]


def weights(config) -> dict:
    return lm.load(config.out).model.state_dict()
