"""The loop: dream, score, update, and evaluate on real pages now and then.

    for each update:
        1. evaluate on real pages, sometimes
        2. dream: a few starts, a group of rollouts from each, experts mixed in (dream.py)
        3. advantages in each group, old log-probs, `minibatches` GSPO steps (gspo.py)
        4. log; checkpoint

    python train.py laptop --seed 1 --out runs/laptop/dream1        # after `make`, whose models it takes
    python train.py laptop --real-fraction 1 --out runs/real        # real pages: no world model, no judge
    torchrun --nproc_per_node 8 train.py                            # the paper's recipe

Killed at any moment, the same command goes on from the last checkpoint, and computes what it would have
computed: on a CPU bit for bit, on the same number of ranks.

Shapes: K rollouts of a batch that are learned from; B of a minibatch; N completion tokens of its turns.

What a line of OUT.run/metrics.jsonl has (shares are of 1; what nothing in the update has is left out):
    update                  its number, from 0; in the last line, how many there were
    real_success            share of dev seeds' real pages won, greedy, in evaluate_horizon steps. Believe it
    dream_success           share of dreams that the judge passes. Where it rises alone, the judge is fooled
    real_train_success      the same of real pages that are learned from, sampled
    groups                  each group's task, and whether it had a signal: rewards that differ
    learned, experts, dreams, real_rollouts     rollouts learned from; of experts; dreamed; on real pages
    real_steps              all actions on real pages, those of prefixes and of discarded rollouts too
    discarded               rollouts that nobody could read or imagine, by cause (NOTES 3.7)
    truncated, no_action    shares of own rollouts that ran out of steps; whose last text was no action
    turns, turn_tokens, entropy                 of own rollouts: means; -log p of sampled tokens, nats
    sampler_gap             mean |sampled - scored log-prob|: .01 to .02 in bf16, .2: sync failed (NOTES 5.9)
    clip_frac               share of rollouts that the clip leaves out, over the minibatches
    ratio_mean, ratio_max, abs_log_ratio        s_i of Eq. 7; mean |log s_i| before any clip
    grad_norm               before its clip
    seconds_rollouts, seconds_update, seconds_evaluate
"""

import contextlib
import hashlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

import distributed
import dream
import envs
import gspo
import inference
import lm
import report
from config import TRAIN, Train, UserError, chosen
from judge import AnyJudge, Judge
from policy import Rollout, Turn
from world_model import AnyWorldModel, WorldModel

# (logp (N,), old_logp (N,), rollout (N,), advantages (B,), eps_low, eps_high) -> (coefficients (N,),
# metrics with ratio_max), as gspo.gspo_coefficients. The gradient is that of -1/B sum_t coefficient_t logp_t.
Loss = Callable[..., tuple[torch.Tensor, dict[str, float]]]

# ---- the loop ----------------------------------------------------------------------------------------------

def train(config: Train, env: Any = None, world_model: AnyWorldModel | None = None,
          judge: AnyJudge | None = None, loss: Loss = gspo.gspo_coefficients) -> None:
    """The run, from its first update or last checkpoint to its last. All ranks call it. What is handed in is
    used: pages (as envs.Envs: env() and dev_starts), a world model, a judge, a loss."""
    # ---- what is given, and what a killed run left ----
    files, first = Path(f"{Path(config.out)}.run"), distributed.rank() == 0
    files.mkdir(parents=True, exist_ok=True)
    envs.kind(config.on)  # before the models, as starts: it is quick to find that a setting is wrong
    starts = dream.starts(config)
    model, models = load_models(config, files, world_model, judge)
    agent: Any = models.agent
    # .98: with .999 four steps an update would be remembered for some 250 updates.
    optimizer = torch.optim.AdamW(model.net.parameters(), config.lr, (0.9, 0.98), weight_decay=0.0,
                                  fused=True)
    run = identity(config)
    done = distributed.load_checkpoint(files / "checkpoint", model.net, optimizer, run)
    if done > config.updates:
        raise UserError(f"{files} has done {done} updates: give as many --updates, or another --out")
    if first:
        for name in ("metrics.jsonl", "dreams.jsonl"):  # without updates that will be computed again
            rows = [row for row in report.read(files / name) if row["update"] < done]
            (files / "cut.tmp").write_text("".join(json.dumps(row) + "\n" for row in rows))
            os.replace(files / "cut.tmp", files / name)
        (files / "config.json").write_text(json.dumps(asdict(config), indent=1))
        print(f"{files}: {done} of {config.updates} updates are done; {len(starts)} starts")
    needed = not env and (config.evaluate_every or config.real_fraction)
    with (envs.Envs(config.on) if needed else contextlib.nullcontext(env) as pages,
          open(files / "metrics.jsonl" if first else os.devnull, "a") as log,
          open(files / "dreams.jsonl" if first else os.devnull, "a") as dreams,
          tqdm(total=config.updates, initial=done, desc="updates", disable=not first) as bar):
        for n in range(done, config.updates + 1):
            rng = random.Random(f"{config.seed} {n}")
            metrics: dict[str, Any] = {"update": n}  # a line of the log
            if agent.model is not model:  # a replica or an engine takes over the trained weights
                agent.model.sync(distributed.full_tensors(model.net, model.compute))

            # ---- 1. real pages, of dev seeds: never learned from ----
            if config.evaluate_every and (n % config.evaluate_every == 0 or n == config.updates):
                began = time.time()
                dev = distributed.shard_rows(pages.dev_starts(config.evaluate_seeds, starts))
                played = envs.play(pages, agent, dev, config.evaluate_horizon, config.max_new_tokens)
                success = [done.reward for done in distributed.collect(played) if not envs.failed(done)]
                metrics |= {"real_success": round(fmean(success), 4)} if success else {}
                metrics["seconds_evaluate"] = round(time.time() - began, 1)
            if n == config.updates:
                write(log, metrics, bar)
                break

            # ---- 2. dream, or act: the ranks share the rollouts, then every rank holds them all ----
            began = time.time()
            sampled = dream.sample_starts(rng, starts, config.groups)
            real = [config.real_fraction > 0 and rng.random() < config.real_fraction for _ in sampled]
            batch = dream.batch(models, sampled, config, (config.seed, n), pages, real)
            metrics |= of_batch(batch) | {"seconds_rollouts": round(time.time() - began, 1)}
            report.keep(dreams, n, config.updates, batch, model.tokenizer.decode)
            lost = sum(metrics["discarded"].values())
            tried = sum(bool(rollout.discarded) or not rollout.expert for rollout in batch.rollouts)
            if n == 0 and lost > config.discard_limit * tried:
                raise UserError(f"{lost} of {tried} rollouts discarded: {metrics['discarded']}. Give longer "
                                "contexts and answers, other models, or --discard-limit 1")

            # ---- 3. update, unless no group has a signal; all ranks hold the batch, and agree ----
            began = time.time()
            if batch.learned:
                rewards = torch.tensor([float(rollout.reward) for rollout in batch.learned])  # (K,)
                advantages = gspo.group_advantages(rewards, torch.tensor(batch.groups))  # (K,)  Eq. 6
                metrics |= update(model, optimizer, batch.learned, advantages, config, rng, loss)
            metrics["seconds_update"] = round(time.time() - began, 1)

            # ---- 4. log, checkpoint ----
            write(log, metrics, bar)
            if first and "seconds_evaluate" in metrics:
                report.write(files, 8)
            if (n + 1) % config.checkpoint_every == 0 or n + 1 == config.updates:
                distributed.save_checkpoint(files / "checkpoint", n + 1, model.net, optimizer, run)
    lm.save(model, config.out)
    if first:
        print(f"the policy: {config.out}   a page to look at: {report.write(files)}")


# ---- the update: Eq. 10 (gspo.py) added up in pieces -------------------------------------------------------

def update(model: lm.LM, optimizer: torch.optim.Optimizer, rollouts: Sequence[Rollout],
           advantages: torch.Tensor, config: Train, rng: random.Random,
           loss: Loss = gspo.gspo_coefficients) -> dict:
    """`minibatches` GSPO steps on one batch, which every rank holds whole. advantages (K,). Returns metrics.
    Raises UserError where sampled and scored log-probs are too far apart."""
    model.net.train()
    parts = split(len(rollouts), config.minibatches, rng)
    minibatches = [[turn for k in part for turn in rollouts[k].turns] for part in parts]
    old_logps = [score(model, turns, config) for turns in minibatches]  # (N,) each: by what dreamed
    gap = check_gap(minibatches, old_logps)
    seen = []  # each step's metrics
    for step, (part, turns, old_logp) in enumerate(zip(parts, minibatches, old_logps)):
        # In old_logp's microbatches: the difference is the policy's change, not another padding's rounding.
        logp = score(model, turns, config) if step else old_logp  # (N,)
        index = torch.tensor([b for b, k in enumerate(part) for turn in rollouts[k].turns
                              for _ in turn.completion_ids])  # (N,)
        coefficients, found = loss(logp, old_logp, index, advantages[part], config.eps_low, config.eps_high)
        pulls = coefficients.split(sizes(turns))  # (N,) -> those of each turn
        left = [k for k, pull in enumerate(pulls) if pull.any()]  # what is clipped needs no backward pass
        for which, weight, new_logp in passes(model, [turns[k] for k in left], config):
            pull = torch.cat([pulls[left[k]] for k in which]).to(new_logp.device)  # (N of this microbatch,)
            (-weight * (pull * new_logp).sum() / len(part)).backward()  # Eq. 10; ranks are summed
        seen.append(found | {"grad_norm": distributed.clip_grad_norm(model.net, config.clip_norm)})
        optimizer.step()
        optimizer.zero_grad()
    model.net.eval()
    means = {name: fmean([found[name] for found in seen]) for name in seen[0]}
    means |= {"ratio_max": max(found["ratio_max"] for found in seen), "sampler_gap": gap}
    return {name: round(value, 6) for name, value in means.items()}


def split(count: int, minibatches: int, rng: random.Random) -> list[list[int]]:
    """The numbers below `count`, shuffled, in at most so many parts."""
    order = list(range(count))
    rng.shuffle(order)
    return [order[k::minibatches] for k in range(min(minibatches, count))]


def sizes(turns: Sequence[Turn]) -> list[int]:
    return [len(turn.completion_ids) for turn in turns]


def passes(model: lm.LM, turns: Sequence[Turn], config: Train) -> Iterator[tuple]:
    """This rank's microbatches of turns: (which turns, weight, their log-probs in a row). A weight of 0 marks
    a duplicate: all ranks make the same number of forwards (distributed.assign)."""
    lengths = [len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns]
    microbatches = lm.microbatches(lengths, config.tokens)
    costs = [sum(lengths[k] for k in which) for which in microbatches]
    for index, weight in distributed.assign(costs, distributed.world_size())[distributed.rank()]:
        pairs = [(turns[k].prompt_ids, turns[k].completion_ids) for k in microbatches[index]]
        yield microbatches[index], weight, lm.token_logps(model, pairs, config.temperature)[0]


@torch.no_grad()
def score(model: lm.LM, turns: Sequence[Turn], config: Train) -> torch.Tensor:
    """log pi_theta (N,) of all tokens, on the CPU of every rank. Each rank scores its share."""
    mine = [pair for which, _, logp in passes(model, turns, config)
            for pair in zip(which, logp.cpu().split(sizes([turns[k] for k in which])))]
    found = dict(pair for part in distributed.gather(mine) for pair in part)
    return torch.cat([found[k] for k in range(len(turns))])


def check_gap(minibatches: Sequence[Sequence[Turn]], scored: Sequence[torch.Tensor]) -> float:
    """Mean |sampled - scored log-prob| of a token, over what was sampled (experts' turns were not). UserError
    above 0.1: a broken weight sync looks like 0.2, a healthy one like 0.02 (NOTES 5.9)."""
    gaps = [(logp - torch.tensor(turn.logps)).abs() for turns, logps in zip(minibatches, scored)
            for turn, logp in zip(turns, logps.split(sizes(turns))) if turn.logps]
    gap = float(torch.cat(gaps).mean()) if gaps else 0.0
    if not gap <= 0.1:  # nan is not healthy either
        raise UserError(f"sampled and scored log-probs differ by {gap:.3f} a token (healthy: 0.02): other "
                        "weights or another temperature. Nothing was learned from this batch")
    return gap


# ---- what is logged, and what is resumed -------------------------------------------------------------------

def of_batch(batch: dream.Batch) -> dict:
    """What is logged of a batch (the docstring)."""
    sampled = [done for done in batch.rollouts if not done.expert and not done.discarded]
    turns = [turn for done in sampled for turn in done.turns]
    means: dict[str, Sequence[float]] = {
        "dream_success": [done.reward for done in sampled if not done.real],
        "real_train_success": [done.reward for done in sampled if done.real],
        "truncated": [done.truncated for done in sampled], "no_action": [done.no_action for done in sampled],
        "turns": [len(done.turns) for done in sampled], "turn_tokens": sizes(turns),
        "entropy": [-logp for turn in turns for logp in turn.logps]}
    kinds = Counter("experts" if done.expert else "real_rollouts" if done.real else "dreams"
                    for done in batch.rollouts)
    causes = Counter(":".join(done.discarded.split(":")[:2]) for done in batch.rollouts if done.discarded)
    return {name: round(fmean(values), 4) for name, values in means.items() if values} | {
        "groups": batch.signals, "learned": len(batch.learned), "discarded": dict(causes), **kinds,
        "real_steps": sum(len(done.start.prefix) + len(done.steps) for done in batch.rollouts if done.real)}


def write(log, metrics: dict, bar: tqdm) -> None:
    """A line of metrics.jsonl, and one for who watches."""
    log.write(json.dumps(metrics) + "\n")
    log.flush()
    shown = ("update", "dream_success", "real_train_success", "real_success", "learned", "discarded")
    bar.write("  ".join(f"{name} {metrics[name]}" for name in shown if name in metrics))
    bar.update("learned" in metrics)


# What a resumed run may change: its length, what moves only rounding, contexts (too long is discarded).
MAY_CHANGE = ("updates", "evaluate_every", "evaluate_seeds", "evaluate_horizon", "checkpoint_every", "out",
              "tokens", "offload", "discard_limit", "context", "world_model_context", "judge_context",
              "world_model_urls", "judge_urls", "policy_engine", "world_model_server", "judge_server")


def identity(config: Train) -> dict:
    """What has to be the same where a run goes on: settings, and a digest of the models and recordings that
    they name (of each file its size and last MiB: all of an 8B model would take a minute)."""
    settings = {name: value for name, value in asdict(config).items() if name not in MAY_CHANGE}
    settings["compute"] = str(lm.matrix_type(config.compute))
    for name in ("policy", "world_model", "judge", "recorded"):
        path, digest = Path(settings[name] or "-"), hashlib.sha256()  # "" would be the working directory
        for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
            with file.open("rb") as content:
                content.seek(max(0, file.stat().st_size - 2**20))
                digest.update(f"{file.name} {file.stat().st_size} ".encode() + content.read())
        settings[f"what stands at {name}"] = digest.hexdigest()[:12]
    return settings


# ---- the models --------------------------------------------------------------------------------------------

def load_models(config: Train, files: Path, world_model: AnyWorldModel | None = None,
                judge: AnyJudge | None = None) -> tuple[lm.LM, dream.Models]:
    """(the model that is trained, who dreams: what is handed in, else the config's). In one process without
    vLLM the trained model acts itself. Otherwise a replica or an engine does, on each rank."""
    compute, vllm = lm.matrix_type(config.compute), config.sampler == "vllm"
    sharded, dreamed = distributed.world_size() > 1 or vllm, config.real_fraction < 1
    needed: dict[str, Any] = {}  # of what is not handed in: folder, URLs, server, context
    if dreamed and not world_model:
        needed["world_model"] = (config.world_model, config.world_model_urls, config.world_model_server,
                                 config.world_model_context)
    if dreamed and not judge:
        if not (config.judge or config.judge_tokens):
            raise UserError("a policy judges by its reasons: give --judge-tokens, or a reward model: --judge")
        needed["judge"] = (config.judge or config.policy, config.judge_urls, config.judge_server,
                           config.judge_context)
    for folder in [config.policy, *(folder for folder, urls, *_ in needed.values() if not urls)]:
        lm.check_folder(folder)  # before the first is loaded, which may take minutes
    model = lm.load(config.policy, config.context, compute, sharded=sharded, offload=config.offload)
    if vllm:
        samplers: dict[str, Any] = dict(inference.serve(needed, files))  # first: it measures what is free
        agent = lm.Batched(inference.Engine(config.policy, config.context, compute, config.policy_engine))
    else:
        local = lambda folder, context: lm.Batched(lm.freeze(lm.load(folder, context, compute)))
        samplers = {name: local(folder, context) for name, (folder, *_, context) in needed.items()}
        agent = local(config.policy, config.context) if sharded else lm.Batched(model)
    if found := samplers.get("world_model"):
        world_model = WorldModel(found, config.world_model_tokens, config.world_model_temperature)
    if found := samplers.get("judge"):
        judge = Judge(found, config.judge_tokens)
    return model, dream.Models(agent, world_model, judge)


def main() -> None:
    config = chosen(TRAIN)
    distributed.command(lambda: train(config), alone=config.sampler == "vllm")


if __name__ == "__main__":
    main()
