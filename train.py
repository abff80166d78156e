"""The loop: dream, score, update, and look at the real web now and then.

    for each update:
        1. look at the real web, sometimes (measure.py)
        2. dream n trajectories from each of a few starts, experts mixed in (dream.py)
        3. advantages in each group, old log-probs, `minibatches` GSPO steps (update.py, gspo.py)
        4. log; checkpoint
    write the agent

    python train.py laptop                                  # after `make`, whose models it takes
    python train.py laptop --world real --out runs/real     # real pages alone: no world model, no judge
    torchrun --nproc_per_node 8 train.py       # the paper's recipe

The first two are the laptop's, on MiniWoB++ pages; their models are sft.py's.

With --world both, a share of the groups is done on real pages and the rest is dreamed, as Dyna mixes real and
imagined experience (Sutton 1991). Real steps are counted (`real_steps`), since they are what dreams save.

If the run is killed, the same command goes on from the last checkpoint, and computes what it would have
computed: on a CPU bit for bit, on the same number of ranks. What the ranks share: distributed.py.

Shapes: K kept trajectories of a batch.

What a line of OUT.run/metrics.jsonl has (shares are of 1; what nothing in the update has is left out):
    update                  its number, from 0; in the last line, how many there were
    real_success            share of dev pages solved, greedy, in updates that look. The one to believe
    real_failed, looked_at  pages that failed twice in a look and do not count; which pages were looked at
    dream_success           share of the agent's own dreams that the judge passes. Where it rises alone, the
                            judge is being fooled
    real_train_success      the same of groups on real pages, by the page's own reward
    groups, goals           each group's task, and whether it had a signal; which goals (CRC-32)
    kept, experts, dreams   trajectories that are learned from; rows that are an expert's; rows dreamed
    dropped_groups          share of groups with equal rewards: nothing to teach (NOTES 3.6)
    real_trajectories, real_steps           rows done on real pages; all actions there
    dropped_dreams, drops   rows that nobody could read or imagine; by cause (NOTES 3.7)
    truncated, parse_failures               own trajectories that a limit cut off; that wrote no action
    steps, response_tokens, entropy         mean turns; tokens a turn; -log p of own tokens, nats
    judged, judge_malformed                 verdicts; those that could not be read
    tokens_sampled          by agent, world model and judge, on all ranks
    sampler_gap             mean |sampled - scored log-prob|: .01 in bf16, .2 where a sync failed (NOTES 5.9)
    clip_frac               share of trajectories that the clip leaves out, over the minibatches
    ratio_mean, ratio_max, abs_log_ratio    s_i of Eq. 7; mean |log s_i| before any clip
    grad_norm, idle         before the norm's clip; share of the ranks' time that waits for the slowest
    seconds_dream, seconds_update, seconds_real     of dreams, of learning, of a look
"""

import contextlib
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from tqdm import tqdm

import distributed
import dream
import gpt_oss
import gspo
import lm
import measure
import policy
import recipe
import remote
import report
import stories
import update
from judge import Judge
from node import dreams, engine, webworld
from policy import Sampler
from world_model import WorldModel
from worlds import benchmarks
from worlds.miniwob import LAPTOP

# ---- the loop ----------------------------------------------------------------------------------------------


def train(config: recipe.Train, coefficients_of: update.Coefficients = gspo.gspo_coefficients,
          advantages_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = gspo.group_advantages,
          web: policy.World | None = None,
          load: Callable[[recipe.Train, Path], tuple[lm.LM, dream.Models]] | None = None) -> None:
    """The run, from its first update or its last checkpoint to its last update. All ranks call it.

    What you may hand in (examples/): another world in the place of MiniWoB++'s pages, `web`, which knows the
    tasks of config.trajectories (with config.world "dream" it is only looked at). Another world model or
    judge: `load`, called in the place of load_models(). Another loss: `coefficients_of` or `advantages_of`.
    """
    # ---- what is given: the SFT agent (and, frozen, the judge), the world model, recorded data ----
    config, out = recipe.with_type(config), Path(config.out)
    files = out.parent / f"{out.name}.run"
    files.mkdir(parents=True, exist_ok=True)
    first_rank = distributed.rank() == 0
    knows = benchmarks.knows(config.on) if web is None else lambda task: True
    given = recipe.starts(config, knows)  # before the models: it is quick to find that a file has no success
    model, models = (load or load_models)(config, files)
    agent = models.agent
    starts = recipe.fitting(model, given, config)
    tasks = sorted({start.task for start, _ in starts})
    config = replace(config, updates=recipe.count_updates(config, len(tasks)))
    lm.train_last(model, config.trained_layers)

    # ---- or what a killed run left ----
    optimizer = torch.optim.AdamW([p for p in model.model.parameters() if p.requires_grad], lr=config.lr,
                                  betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    folder = files / "checkpoint"
    run = recipe.identity(config)
    done = distributed.load_checkpoint(folder, model.model, optimizer, run, recipe.MAY_CHANGE)
    if done > config.updates:
        raise ValueError(f"{folder} has done {done} updates already, more than --updates {config.updates}: "
                         "give another --out")
    logged = distributed.gather(measure.cut_metrics(files / "metrics.jsonl", done) if first_rank else None)[0]
    if first_rank:
        measure.cut_metrics(files / stories.FILE, done)
        experts = sum(expert is not None for _, expert in starts)
        begun = (f"{len(starts)} starts, {experts} of them with an expert; {config.dreaming.tasks} x "
                 f"{config.dreaming.group} rows an update in {config.minibatches} GSPO steps; "
                 f"{distributed.world_size()} rank(s)")
        print(f"resuming after update {done} of {config.updates} ({folder})" if done else begun)
        passes = config.updates * config.dreaming.tasks / len(tasks)
        print(f"{config.updates} updates: {passes:.2f} passes over {len(tasks)} tasks")
        (files / "config.json").write_text(json.dumps(asdict(config), indent=1))

    def sync() -> None:
        """An agent that is not the trained model itself (a replica, an engine) takes over its weights."""
        if agent is not model:
            agent.sync(  # type: ignore[attr-defined]  # both have it; a Sampler that is not trained has none
                distributed.full_tensors(model.model, model.compute))

    sync()
    needed = config.evaluate_every or config.real_share > 0  # where it is not, a node may lack Chromium
    real_web: contextlib.AbstractContextManager = (
        benchmarks.world(config.on, remote.grader(config.on)) if needed and web is None
        else contextlib.nullcontext(web))
    tasks_to_look_at = [task for task in tasks if knows(task)] or LAPTOP  # recordings may be of other pages
    with (real_web as web,
          open(files / "metrics.jsonl" if first_rank else os.devnull, "a") as log,
          open(files / stories.FILE if first_rank else os.devnull, "a") as told,
          tqdm(total=config.updates, initial=done, desc="dreaming", unit="update", dynamic_ncols=True,
               disable=not first_rank) as bar):
        looked_at = benchmarks.starts(config.on, web, config.evaluate_seeds, tasks_to_look_at)
        for n in range(done, config.updates + 1):
            rng = random.Random(f"{config.seed} {n}")
            metrics: dict[str, Any] = {"update": n}  # a line of the log

            # ---- 1. the real web, on dev seeds: looked at, never learned from ----
            if config.evaluate_every and (n % config.evaluate_every == 0 or n == config.updates):
                began = time.time()
                assert web is not None
                metrics |= measure.look(web, agent, *looked_at, config.evaluate_horizon,
                                        config.dreaming.max_new_tokens)
                metrics["seconds_real"] = round(time.time() - began, 2)
            if n == config.updates:
                measure.write(log, metrics, bar)
                break

            # ---- 2. dream, or act: the ranks share the rows, then every rank holds them all ----
            began, sampled = time.time(), lm.tokens_sampled()
            batch = models.draw_and_dream(rng, starts, config.dreaming, (config.seed, n), web,
                                          config.real_share)
            metrics |= measure.of_batch(batch) | {"tokens_sampled": measure.sampled_by_all(sampled),
                                        "seconds_dream": round(time.time() - began, 2)}
            logged.append(metrics)
            stories.keep(told, n, config.updates, batch, model.tokenizer.decode)
            recipe.check_drops(logged, config)

            # ---- 3. update, unless no group has anything to teach; all ranks hold the batch, and agree ----
            began = time.time()
            if batch.kept:
                rewards = torch.tensor([trajectory.reward for trajectory in batch.kept])  # (K,)
                advantages = advantages_of(rewards, torch.tensor(batch.groups))  # (K,)  Eq. 6
                model.model.train()
                metrics |= update.update(model, optimizer, batch.kept, advantages, config,
                                         config.dreaming.temperature, rng, coefficients_of)
                model.model.eval()
                sync()
            metrics["seconds_update"] = round(time.time() - began, 2)

            # ---- 4. log, keep ----
            measure.write(log, metrics, bar)
            if first_rank and "seconds_real" in metrics:
                report.of_training(files)
            if (n + 1) % config.checkpoint_every == 0 or n + 1 == config.updates:
                distributed.save_checkpoint(folder, n + 1, model.model, optimizer, run,
                                            config.keep_checkpoints)
    lm.save(model, out)
    if first_rank:
        measure.plot(files / "metrics.jsonl", files / "curve.png")
        print(f"the agent: {out}   a page to look at: {report.of_training(files)}")


def load_models(config: recipe.Train, files: Path) -> tuple[lm.LM, dream.Models]:
    """(the model that is trained, the models that dream). World model and judge are None where nothing is
    dreamed.

    In one process without vLLM the model that is trained also acts. Otherwise a replica or an engine acts on
    each rank, and takes over the weights after every update.
    """
    compute, dreaming = lm.matrix_type(config.compute), config.dreaming
    sharded, dreamed = distributed.world_size() > 1 or config.sampler == "vllm", config.real_share < 1
    judge_model = config.judge_model or config.policy
    if dreamed and dreaming.judge == "policy" and not (config.judge_model or dreaming.judge_tokens):
        raise ValueError("a policy that judges itself writes reasons first: give --dreaming.judge-tokens, "
                         "or the reward model as --judge-model")
    model = lm.load(config.policy, config.context, compute, sharded=sharded, offload=config.offload)
    agent: Sampler
    world_lm: Sampler | None = None
    judge_lm: Sampler | None = None
    url = remote.is_url(config.world_model)
    if config.sampler == "vllm":
        served = {} if url else {"world_model": (config.world_model, config.world_model_urls,
                                                 config.world_model_server, config.world_model_context)}
        if dreaming.judge == "policy":
            served["judge"] = judge_model, config.judge_urls, config.judge_server, config.judge_context
        started = engine.start(served if dreamed else {}, files)  # first: servers measure what is free
        world_lm, judge_lm = started.get("world_model"), started.get("judge")
        agent = engine.Engine(config.policy, config.context, compute, config.policy_engine)
    else:
        agent = lm.freeze(lm.load(config.policy, config.context, compute)) if sharded else model
        if dreamed and not url:
            world_lm = frozen_model(config.world_model, config.world_model_context, compute)
        if dreamed and dreaming.judge == "policy":
            judge_lm = frozen_model(judge_model, config.judge_context, compute)
    if not dreamed:
        return model, dream.Models(agent)
    if url:
        world_lm = cast(Sampler, remote.chat(config.world_model))
    judging = {"policy": judge_lm, "current": agent, "world_model": world_lm}[dreaming.judge]
    # Both are there where something is dreamed.
    world = WorldModel(cast(Sampler, world_lm), dreaming.world_model_tokens, dreaming.world_model_temperature,
                       *webworld.WRITES[dreaming.world_model_writes])
    judge = Judge(cast(Sampler, judging), dreaming.judge_tokens)
    return model, dream.Models(agent, world, judge, dreams.Dream)


def frozen_model(folder: str, context: int, compute: torch.dtype) -> lm.LM:
    """A model that is not trained, in this process, talked to as it was trained. (A server has its own.)"""
    model = lm.freeze(lm.load(folder, context, compute))
    model.template = gpt_oss.template(model.tokenizer)
    return model


# ---- the command -------------------------------------------------------------------------------------------


def main():
    config = recipe.chosen({"laptop": ("two CPU cores: SmolLM2-135M, MiniWoB++ pages", recipe.LAPTOP),
                            "gpu": ("one GPU, an evening: Qwen3-0.6B, MiniWoB++ pages", recipe.GPU),
                            "paper": ("8 x H100: the paper's recipe", recipe.Train())})
    recipe.needs_gpu(config.policy, (recipe.Train.policy, recipe.GPU.policy), "python train.py laptop")
    recipe.command(lambda: train(config), config.sampler == "vllm")


if __name__ == "__main__":
    main()
