"""The loop: dream, score, update, and evaluate on real pages now and then.

    for each update:
        1. evaluate on real pages, sometimes
        2. dream: a few starts, a group of rollouts from each, experts mixed in (dream.py)
        3. advantages in each group, old log-probs, `minibatches` GSPO steps (gspo.py)
        4. log; checkpoint
    write the policy

    python train.py laptop                                          # after `make`, whose models it takes
    python train.py laptop --real-fraction 1 --out runs/real        # real pages: no world model, no judge
    torchrun --nproc_per_node 8 train.py                            # the paper's recipe

Killed at any moment, the same command goes on from the last checkpoint, and computes what it would have
computed: on a CPU bit for bit, on the same number of ranks. What the ranks share: distributed.py.

Shapes: K rollouts of a batch that are learned from; B rollouts of a minibatch; N completion tokens of all
turns of a minibatch (the agent's; in an expert's rollout the recorded ones).

What a line of OUT.run/metrics.jsonl has (shares are of 1; what nothing in the update has is left out):
    update                  its number, from 0; in the last line, how many there were
    real_success            share of dev episodes won on real pages, greedy. The one to believe
    dream_success           share of the agent's own dreams that the judge passes. Where it rises alone, the
                            judge is being fooled
    real_train_success      the same of groups on real pages, by the page's own reward
    groups                  each group's task, and whether it had a signal: rewards that differ
    learned, experts, dreams, real_rollouts     rollouts learned from; of experts; dreamed; on real pages
    real_steps              all actions on real pages, those of prefixes and of discarded rollouts too
    discarded               rollouts that nobody could read or imagine, by cause (NOTES 3.7)
    truncated, no_action    shares of own rollouts that ran out of steps; whose last text was no action
    turns, turn_tokens, entropy                 of own rollouts: means; -log p of sampled tokens, nats
    sampler_gap             mean |sampled - scored log-prob|: .01 in bf16, .2 where a sync failed (NOTES 5.9)
    clip_frac               share of rollouts that the clip leaves out, over the minibatches
    ratio_mean, ratio_max, abs_log_ratio        s_i of Eq. 7; mean |log s_i| before any clip
    grad_norm, idle         before the norm's clip; share of the ranks' time that waits for the slowest
    seconds_dream, seconds_update, seconds_real
"""

import contextlib
import hashlib
import json
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
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
from judge import Judge
from policy import Rollout, Turn
from world_model import WorldModel

# (logp (N,), old_logp (N,), rollout (N,), advantages (B,), eps_low, eps_high) -> (coefficients (N,),
# metrics), as gspo.gspo_coefficients. The minibatch's loss is -1/B sum_t coefficient_t logp_t.
Loss = Callable[..., tuple[torch.Tensor, dict[str, float]]]

# ---- the loop ----------------------------------------------------------------------------------------------


def train(config: Train, models: dream.Models | None = None, model: lm.LM | None = None, pages=None,
          loss: Loss = gspo.gspo_coefficients) -> None:
    """The run, from its first update or its last checkpoint to its last update. All ranks call it.

    What you may hand in (examples/): `models`, with a world model, a judge or an agent of your own, and the
    `model` that is trained; `pages`, environments in the place of MiniWoB++'s (dream.Pages); another `loss`.
    """
    # ---- what is given: models and recorded data ----
    out, first = Path(config.out), distributed.rank() == 0
    files = out.parent / f"{out.name}.run"
    files.mkdir(parents=True, exist_ok=True)
    starts = dream.starts(config)  # before the models: it is quick to find that a file has no success
    if model is None or models is None:
        model, models = load_models(config, files)
    agent = models.agent

    # ---- or what a killed run left ----
    optimizer = torch.optim.AdamW([p for p in model.model.parameters() if p.requires_grad], lr=config.lr,
                                  betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    run = identity(config)
    done = distributed.load_checkpoint(files / "checkpoint", model.model, optimizer, run, MAY_CHANGE)
    if done > config.updates:
        raise UserError(f"{files}/checkpoint has done {done} updates, more than --updates {config.updates}: "
                        "give another --out")
    if first:
        for name in ("metrics.jsonl", "dreams.jsonl"):
            cut(files / name, done)
        (files / "config.json").write_text(json.dumps(asdict(config), indent=1))
        print(f"{files}: after {done} of {config.updates} updates; {len(starts)} starts; {config.tasks} x "
              f"{config.group} rollouts an update in {config.minibatches} GSPO steps; "
              f"{distributed.world_size()} rank(s)")

    def sync() -> None:
        """A replica or an engine takes over the trained weights; in one process without vLLM they are its
        own."""
        sampler = getattr(agent, "model", model)
        if sampler is not model:
            sampler.sync(distributed.full_tensors(model.model, model.compute))

    sync()
    discards = Counter[str]()
    with (contextlib.nullcontext(pages) if pages else envs.open(config.on) as pages,
          open(files / "metrics.jsonl" if first else os.devnull, "a") as log,
          open(files / "dreams.jsonl" if first else os.devnull, "a") as dreams,
          tqdm(total=config.updates, initial=done, desc="dreaming", unit="update", dynamic_ncols=True,
               disable=not first) as bar):
        for n in range(done, config.updates + 1):
            rng = random.Random(f"{config.seed} {n}")
            metrics: dict[str, Any] = {"update": n}  # a line of the log

            # ---- 1. real pages, of dev seeds: never learned from ----
            if config.evaluate_every and (n % config.evaluate_every == 0 or n == config.updates):
                began = time.time()
                played = distributed.collect(pages.play(
                    agent, distributed.shard_rows(pages.dev_starts(config.evaluate_seeds, starts)),
                    config.evaluate_horizon, config.max_new_tokens))
                metrics |= {"real_success": mean([one.reward for one in played if not envs.failed(one)]),
                            "seconds_real": round(time.time() - began, 1)}
            if n == config.updates:
                write(log, metrics, bar)
                break

            # ---- 2. dream, or act: the ranks share the rollouts, then every rank holds them all ----
            began = time.time()
            sampled = dream.sample_starts(rng, starts, config.tasks)
            real = [config.real_fraction > 0 and rng.random() < config.real_fraction for _ in sampled]
            batch = dream.batch(models, sampled, config, (config.seed, n), pages, real)
            metrics |= of_batch(batch) | {"seconds_dream": round(time.time() - began, 1)}
            report.keep(dreams, n, config.updates, batch, model.tokenizer.decode)
            discards.update(metrics["discarded"])
            if n == 2 and discards.total() > config.discard_limit * 3 * len(batch.rollouts):
                raise UserError(f"{discards.total()} of {3 * len(batch.rollouts)} rollouts were discarded: "
                                f"{dict(discards)}. Give longer contexts (--context, --world-model-context, "
                                "--judge-context, ...-tokens) or other models; or --discard-limit 1")

            # ---- 3. update, unless no group has a signal; all ranks hold the batch, and agree ----
            began = time.time()
            if batch.learned:
                rewards = torch.tensor([rollout.reward for rollout in batch.learned])  # (K,)
                advantages = gspo.group_advantages(rewards, torch.tensor(batch.groups))  # (K,)  Eq. 6
                model.model.train()
                metrics |= update(model, optimizer, batch.learned, advantages, config, rng, loss)
                model.model.eval()
                sync()
            metrics["seconds_update"] = round(time.time() - began, 1)

            # ---- 4. log, checkpoint ----
            write(log, metrics, bar)
            if first and "seconds_real" in metrics:
                report.write(files, 8)
            if (n + 1) % config.checkpoint_every == 0 or n + 1 == config.updates:
                distributed.save_checkpoint(files / "checkpoint", n + 1, model.model, optimizer, run)
    lm.save(model, out)
    if first:
        report.plot(files / "metrics.jsonl", files / "curve.png")
        print(f"the policy: {out}   a page to look at: {report.write(files)}")


# ---- the update: Eq. 10 (gspo.py) added up in pieces -------------------------------------------------------

Owned = tuple[int, Turn]  # a turn, and the index of its rollout in the minibatch


def update(model: lm.LM, optimizer: torch.optim.Optimizer, rollouts: Sequence[Rollout],
           advantages: torch.Tensor, config: Train, rng: random.Random,
           loss: Loss = gspo.gspo_coefficients) -> dict:
    """`minibatches` GSPO steps on one batch, which every rank holds whole. advantages (K,). Returns metrics.
    Raises UserError where what was sampled and what is scored are too far apart."""
    order = list(range(len(rollouts)))
    rng.shuffle(order)
    count = min(config.minibatches, len(order))
    parts = [order[k::count] for k in range(count)]
    minibatches = [[(b, turn) for b, k in enumerate(part) for turn in rollouts[k].turns] for part in parts]
    # Planned once: old and new log-probs come from the same microbatches. Their difference is the policy's
    # change, and not the rounding of another padding.
    plans = [lm.microbatches(lengths(turns), config.tokens) for turns in minibatches]
    old_logps = [score(model, turns, plan, config) for turns, plan in zip(minibatches, plans)]  # (N,) each
    metrics: dict[str, float] = defaultdict(float, sampler_gap=check_gap(minibatches, old_logps))
    costs = []  # of the microbatches of each pass, in tokens
    for step, (part, turns, plan, old_logp) in enumerate(zip(parts, minibatches, plans, old_logps)):
        logp = score(model, turns, plan, config) if step else old_logp  # (N,)
        rollout = torch.tensor([b for b, turn in turns for _ in turn.completion_ids])  # (N,)
        coefficients, measured = loss(logp, old_logp, rollout, advantages[part], config.eps_low,
                                      config.eps_high)  # (N,)
        # A rollout that is clipped, or has no advantage, needs no backward pass.
        pulls = coefficients.split([len(turn.completion_ids) for _, turn in turns])
        left = [k for k, pull in enumerate(pulls) if pull.any()]
        turns, pulls = [turns[k] for k in left], [pulls[k] for k in left]
        plan = lm.microbatches(lengths(turns), config.tokens)
        for which, weight, logp in passes(model, turns, plan, config):
            pull = torch.cat([pulls[k] for k in which]).to(logp.device)  # (N of this microbatch,)
            (-weight * (pull * logp).sum() / len(part)).backward()  # Eq. 10; the ranks' gradients are summed
        if not left:  # on no rank, as all plan alike. Adam still moves, by its momentum
            distributed.zero_gradients(model.model)
        metrics["grad_norm"] += distributed.clip_grad_norm(model.model, config.clip_norm) / count
        optimizer.step()
        optimizer.zero_grad()
        costs.append([sum(lengths([turns[k] for k in which])) for which in plan])
        metrics["ratio_max"] = max(metrics["ratio_max"], measured["ratio_max"])
        for name in ("clip_frac", "ratio_mean", "abs_log_ratio"):
            metrics[name] += measured[name] / count
    metrics["idle"] = distributed.idle(costs, distributed.world_size())
    return {name: round(value, 6) for name, value in metrics.items()}


def lengths(turns: Sequence[Owned]) -> list[int]:
    return [len(turn.prompt_ids) + len(turn.completion_ids) for _, turn in turns]


def passes(model: lm.LM, turns: Sequence[Owned], plan: Sequence[Sequence[int]],
           config: Train) -> Iterator[tuple[Sequence[int], float, torch.Tensor]]:
    """This rank's microbatches: (which turns, weight, their log-probs in a row). A weight of 0 marks a
    duplicate: all ranks make the same number of forwards (distributed.assign)."""
    costs = [sum(lengths([turns[k] for k in which])) for which in plan]
    for index, weight in distributed.assign(costs, distributed.world_size())[distributed.rank()]:
        pairs = [(turns[k][1].prompt_ids, turns[k][1].completion_ids) for k in plan[index]]
        yield plan[index], weight, lm.token_logps(model, pairs, config.temperature)[0]


@torch.no_grad()
def score(model: lm.LM, turns: Sequence[Owned], plan: Sequence[Sequence[int]], config: Train) -> torch.Tensor:
    """log pi_theta (N,) of all tokens. Each rank scores its share; every rank returns the whole, on the
    CPU."""
    mine: dict[int, torch.Tensor] = {}
    for which, weight, logp in passes(model, turns, plan, config):
        if weight:
            mine |= zip(which, logp.float().cpu().split([len(turns[k][1].completion_ids) for k in which]))
    found = {k: logp for part in distributed.gather(mine) for k, logp in part.items()}
    return torch.cat([found[k] for k in range(len(turns))])


def check_gap(minibatches: Sequence[Sequence[Owned]], scored: Sequence[torch.Tensor]) -> float:
    """Mean |sampled - scored log-prob| of a token, over what was sampled (experts' turns were not). A broken
    weight sync looks like 0.2, a healthy one like 0.02 (NOTES 5.9): UserError above 0.1."""
    gaps = [torch.zeros(1)]
    for turns, logps in zip(minibatches, scored):
        for (_, turn), logp in zip(turns, logps.split([len(turn.completion_ids) for _, turn in turns])):
            gaps += [(logp - torch.tensor(turn.logps)).abs()] if turn.logps else []
    gap = float(torch.cat(gaps[1:] or gaps).mean())
    if not gap <= 0.1:  # nan is not healthy either
        raise UserError(f"what was sampled and what is scored differ by {gap:.3f} a token (healthy: 0.02): "
                        "the sampler has other weights than the trainer, or another temperature. Nothing was "
                        "learned from this batch; the last checkpoint is good")
    return gap


# ---- what is logged, and what is resumed -------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    return round(sum(values) / max(1, len(values)), 4)


def of_batch(batch: dream.Batch) -> dict:
    """What is logged of a batch (the docstring)."""
    rollouts = batch.rollouts
    own = [one for one in rollouts if not one.expert and not one.discarded]
    real = [one for one in rollouts if one.real]
    success = {name: mean([one.reward for one in own if one.real == on_pages])
               for name, on_pages in (("dream_success", False), ("real_train_success", True))
               if any(one.real == on_pages for one in own)}
    return {
        "groups": batch.groups_of, "learned": len(batch.learned), **success,
        "experts": sum(one.expert for one in rollouts), "real_rollouts": len(real),
        "dreams": sum(not one.expert and not one.real for one in rollouts),
        "real_steps": sum(len(one.start.prefix) + len(one.steps) for one in real),
        "discarded": dict(Counter(":".join(one.discarded.split(":")[:2])
                                  for one in rollouts if one.discarded)),
        "truncated": mean([one.truncated for one in own]), "no_action": mean([one.no_action for one in own]),
        "turns": mean([len(one.turns) for one in own]),
        "turn_tokens": mean([len(turn.completion_ids) for one in own for turn in one.turns]),
        "entropy": mean([-logp for one in own for turn in one.turns for logp in turn.logps])}


def write(log, metrics: dict, bar: tqdm) -> None:
    """A line of metrics.jsonl, and one for who watches."""
    log.write(json.dumps(metrics) + "\n")
    log.flush()
    names = ("dream_success", "real_train_success", "real_success", "learned", "clip_frac", "discarded")
    bar.write(f"update {metrics['update']:4d}  " + "  ".join(f"{name} {metrics[name]}" for name in names
                                                            if name in metrics))
    bar.update("learned" in metrics)


def cut(file: Path, done: int) -> None:
    """Remove the lines of updates that will be computed again, and a last line that a kill cut in half."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    whole = [line for line in lines if line.endswith("}\n") and json.loads(line)["update"] < done]
    file.with_suffix(".tmp").write_text("".join(whole))
    os.replace(file.with_suffix(".tmp"), file)


# What a resumed run may change: how far it goes, and what changes no update but for rounding.
MAY_CHANGE = ("updates", "evaluate_every", "evaluate_seeds", "evaluate_horizon", "checkpoint_every", "out",
              "tokens", "offload", "discard_limit", "context", "world_model_context", "judge_context",
              "world_model_urls", "judge_urls", "policy_engine", "world_model_server", "judge_server")


def identity(config: Train) -> dict:
    """What a checkpoint holds of its run: the settings, and 12 digits of the models and recordings that they
    name (of each file its size and last MiB: all of an 8B model would take a minute)."""
    settings = asdict(config)
    for name in ("policy", "world_model", "judge", "recorded"):
        path, digest = Path(settings[name]), hashlib.sha256()
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []:
            with file.open("rb") as content:
                content.seek(max(0, file.stat().st_size - 2**20))
                digest.update(f"{file.name} {file.stat().st_size} ".encode() + content.read())
            settings[f"what stands at {name}"] = digest.hexdigest()[:12]
    return settings


# ---- the models --------------------------------------------------------------------------------------------


def load_models(config: Train, files: Path) -> tuple[lm.LM, dream.Models]:
    """(the model that is trained, the models that dream). In one process without vLLM the model that is
    trained also acts. Otherwise a replica or an engine acts on each rank, and takes over the weights after
    every update. World model and judge are None where nothing is dreamed."""
    compute, vllm = lm.matrix_type(config.compute), config.sampler == "vllm"
    sharded, dreamed = distributed.world_size() > 1 or vllm, config.real_fraction < 1
    judge = config.judge or config.policy
    if dreamed and not (config.judge or config.judge_tokens):
        raise UserError("a policy that judges itself writes reasons first: give --judge-tokens, or a reward "
                        "model as --judge")
    model = lm.load(config.policy, config.context, compute, sharded=sharded, offload=config.offload)
    local = lambda folder, context: lm.Batched(lm.freeze(lm.load(folder, context, compute)))
    url, samplers = inference.is_url(config.world_model), dict[str, Any]()
    if vllm:
        served = {"judge": (judge, config.judge_urls, config.judge_server, config.judge_context)}
        if not url:
            served["world_model"] = (config.world_model, config.world_model_urls, config.world_model_server,
                                     config.world_model_context)
        samplers = inference.serve(served if dreamed else {}, files)  # first: servers measure what is free
        agent = lm.Batched(inference.Engine(config.policy, config.context, compute, config.policy_engine))
    else:
        agent = local(config.policy, config.context) if sharded else lm.Batched(model)
        if dreamed:
            samplers["judge"] = local(judge, config.judge_context)
        if dreamed and not url:
            samplers["world_model"] = local(config.world_model, config.world_model_context)
    if not dreamed:
        return model, dream.Models(agent)
    world: Any = samplers["world_model"] if not url else inference.Chat(config.world_model)
    return model, dream.Models(
        agent, WorldModel(world, config.world_model_tokens, config.world_model_temperature),
        Judge(samplers["judge"], config.judge_tokens))


def main() -> None:
    config = chosen(TRAIN)
    config = replace(config, compute=str(lm.matrix_type(config.compute)).removeprefix("torch."))
    distributed.command(lambda: train(config), alone=config.sampler == "vllm")


if __name__ == "__main__":
    main()
