"""Supervised fine-tuning by likelihood: the policy from successes, the world model from transitions, the
reward model from outcomes.

    loss = -(1/N) sum log p(token | all before it)      N: the target tokens of a step, over all ranks

Where the pairs are the world model's, this is Eq. 4 of arXiv 2601.22149. A pair is (prompt_ids,
completion_ids), and only completion tokens are learned (lm.py).

    python sft.py policy laptop                          # writes runs/laptop/sft
    python sft.py world_model laptop                     # writes runs/laptop/world_model
    python sft.py reward_model laptop                    # from episodes that the policy played (Makefile)
    torchrun --nproc_per_node 8 sft.py world_model       # gpt-oss-120b with LoRA on NNetNav's transitions
    torchrun --nproc_per_node 8 sft.py policy            # Llama-3.1-8B on NNetNav, but for a published one

Killed at any moment, the same command goes on from its last checkpoint.
"""

import functools
import json
import math
import random
import shutil
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

import annotate
import config as settings
import data
import distributed
import gpt_oss
import judge
import lm
import policy
import world_model
from config import SFT, UserError
from data import Trajectory

# Pairs of token ids that stay in one microbatch: one, or a judge's of one ending (judge.examples).
Item = Sequence[tuple[Sequence[int], Sequence[int]]]
# (logp (N,) of a microbatch's target tokens, the row (N,) of each, the index of each row's item) -> (0-d):
# what is minimised, summed over these tokens.
Loss = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor]

# ---- what is learned from ----------------------------------------------------------------------------------

def successes(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [t for t in trajectories if t.reward == 1 and t.terminated]


def first(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """The first `count` trajectories of every task, in the file's order; all of them when count is 0."""
    seen, kept = Counter[str](), []
    for t in trajectories:
        seen[t.task] += 1
        kept += [t] if not count or seen[t.task] <= count else []
    return kept


def tokenised(what: str, config: SFT) -> tuple[list[Item], Counter]:
    """What is learned from, and what became of all else. The ranks share the work, and then all of them hold
    all of it: as arrays, a ninth of what lists take. Raises UserError where there is nothing."""
    words, counts, made = lm.load_tokenizer(config.base), Counter[str](), Counter[str]()
    if config.system_prompt:
        words.init_kwargs["system_prompt"] = config.system_prompt
    model: Any = SimpleNamespace(template=gpt_oss.template(words), context=config.context)
    recorded = data.read_trajectories(config.recorded, counts) if config.recorded else []
    played = data.read_trajectories(config.played, counts) if config.played else []
    if what == "policy":
        recorded, played = successes(recorded), []
    if what == "reward_model" and played:  # other tasks' endings would be an explorer's alone (NOTES 11.4)
        tasks = {t.task for t in played}
        counts["dropped: of tasks that were not played"] = sum(t.task not in tasks for t in recorded)
        recorded = [t for t in recorded if t.task in tasks]
    recorded = first(recorded, config.per_task)
    counts["trajectories"] = len(recorded) + len(played)
    written = annotate.read(config.rationales) if config.rationales else {}
    rationale = (lambda *step: written.get(annotate.key(*step), "")) if config.rationales else None
    pairs = (policy.examples if what == "policy" else
             functools.partial(world_model.examples, rationales=rationale))
    if what == "reward_model":  # an episode's other goals are those of all episodes
        items: list[Item] = list(judge.examples(model, played + recorded, counts))
    else:
        mine = tqdm(distributed.shard_rows(recorded + played), "tokenising", disable=distributed.rank() != 0)
        shared = [[(array("i", prompt), array("i", ids)) for prompt, ids in pairs(model, [t], made)]
                  for t in mine]
        items = [[pair] for part in distributed.collect(shared) for pair in part]
        for of in distributed.gather(made):
            counts.update(of)
    if not items:
        raise UserError(f"{config.recorded} {config.played}: there is nothing to learn from ({dict(counts)})")
    return items, counts


# ---- the steps ---------------------------------------------------------------------------------------------

def cosine(step: int, steps: int) -> float:
    """Factor on the learning rate at `step` of `steps`: linear warm-up over 3 %, then a cosine to .1."""
    warm = max(1, round(0.03 * steps))
    done = (step - warm) / max(1, steps - warm)
    return (step + 1) / warm if step < warm else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def schedule(lengths: Sequence[int], config: SFT) -> list[list[list[int]]]:
    """The steps of a fine-tuning: steps[n][m] are the items of microbatch m of step n.

    The microbatches of a step cost alike: ranks that share it wait for the most expensive one, which in
    random order costs twice the mean (NOTES 10.9). The steps come in random order.

    >>> schedule([4, 9, 8, 3, 10, 9], SFT(tokens=10, microbatches=2))  # they cost 7, 10, 9, 9, 8
    [[[3, 0]], [[4], [1]], [[5], [2]]]
    """
    rng, schedule = random.Random(config.seed), []
    for epoch in range(math.ceil(config.epochs)):
        batches = lm.microbatches(lengths, config.tokens, rng)
        batches = batches[: math.ceil(len(batches) * min(1.0, config.epochs - epoch))]
        order = sorted(range(len(batches)), key=lambda m: -sum(lengths[i] for i in batches[m]))
        steps = [order[k : k + config.microbatches] for k in range(0, len(order), config.microbatches)]
        schedule += [[batches[m] for m in step] for step in sorted(steps)]  # shuffled: m is random
    return schedule


def fit(model: lm.LM, items: Sequence[Item], config: SFT, checkpoint: str | Path = "",
        loss: Loss = lambda logp, row, which: -logp.sum()) -> dict:
    """Minimise the mean of `loss` over a step's target tokens, in place. Returns {steps, tokens, loss}.
    `checkpoint`: a folder to resume from. All ranks give the same items, and share a step's microbatches.
    Raises UserError when there are fewer of these than ranks.

    Where a step has several microbatches, its gradient is weighed by its tokens. The microbatches of a step
    cost alike, so some steps have short sequences alone, whose tokens would count double (NOTES 10.9).
    """
    ranks = distributed.world_size()
    if config.microbatches < ranks:
        raise UserError(f"--microbatches {config.microbatches}: of {ranks} ranks some would always idle")
    lengths = [sum(len(prompt) + len(ids) for prompt, ids in item) for item in items]
    steps = schedule(lengths, config)
    costs = [[sum(lengths[i] for i in batch) for batch in step] for step in steps]  # in tokens
    average = sum(map(sum, costs)) / len(steps)
    optimizer = torch.optim.AdamW([p for p in model.net.parameters() if p.requires_grad], lr=config.lr,
                                  betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    plain = lambda item: [(list(prompt), list(ids)) for prompt, ids in item]  # of tokenised()'s arrays
    run = {"sft": asdict(config), "items": lm.mix(lengths, plain(items[0]), plain(items[-1])),
           "matrix products": str(model.compute), "base": model.net.config.name_or_path}
    begin = distributed.load_checkpoint(checkpoint, model.net, optimizer, run) if checkpoint else 0
    bar = tqdm(steps[begin:], initial=begin, total=len(steps), desc=Path(config.out).name, unit="step",
               mininterval=1, dynamic_ncols=True, disable=distributed.rank() != 0)
    smooth = math.nan
    model.net.train()
    for n, step in enumerate(bar, begin):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * cosine(n, len(steps))
        weight = sum(costs[n]) / average if config.microbatches > 1 else 1.0
        learned = [[pair for i in batch for pair in plain(items[i])] for batch in step]
        # Counted over all ranks and microbatches, or the tokens of a short microbatch would weigh more.
        targets, mine = sum(len(completion) for batch in learned for _, completion in batch), 0.0
        for index, share in distributed.assign(costs[n], ranks)[distributed.rank()]:
            which = [i for i in step[index] for _ in items[i]]
            logp, row = lm.token_logps(model, learned[index])  # (N,), (N,)
            part = share * loss(logp, row, which) / targets
            (weight * part).backward()
            mine += part.item()
        # The limit has the weight too, or clipping would undo it.
        distributed.clip_grad_norm(model.net, config.clip_norm * weight)
        optimizer.step()
        optimizer.zero_grad()
        total = sum(distributed.gather(mine))
        smooth = total if math.isnan(smooth) else 0.95 * smooth + 0.05 * total
        bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
        if checkpoint and (n + 1) % config.checkpoint_every == 0 and n + 1 < len(steps):
            distributed.save_checkpoint(checkpoint, n + 1, model.net, optimizer, run, keep=1)
    model.net.eval()
    return {"steps": len(steps), "tokens": sum(map(sum, costs)), "loss": round(smooth, 4)}


# ---- the command -------------------------------------------------------------------------------------------

def learn(what: str, config: SFT) -> dict:
    """Fine-tune config.base and write config.out, with training.json (which is returned): what was learned
    from. All ranks call it."""
    folder, lora = Path(f"{Path(config.out)}.sft"), (config.lora_rank, config.lora_alpha)
    base = lm.check_folder(config.base)
    items, counts = tokenised(what, config)
    if config.lora_rank:
        model = gpt_oss.load(base, config.context, *lora, offload=config.offload)
    else:
        model = lm.load(base, config.context, sharded=distributed.grouped(), offload=config.offload)
    if config.system_prompt:
        model.tokenizer.init_kwargs["system_prompt"] = config.system_prompt
    report = fit(model, items, config, folder) | counts
    if config.lora_rank:
        gpt_oss.save(model, base, config.out, *lora)
    else:
        lm.save(model, config.out)
    if distributed.rank() == 0:
        Path(config.out, "training.json").write_text(json.dumps(report, indent=1))
        shutil.rmtree(folder, ignore_errors=True)  # the model is written: its checkpoints can go
    return report


def main() -> None:
    presets = {"policy": settings.POLICY_SFT, "world_model": settings.WORLD_MODEL_SFT,
               "reward_model": settings.REWARD_MODEL_SFT}
    if len(sys.argv) < 2 or sys.argv[1] not in presets:
        sys.exit(f"sft.py: fine-tune what? python sft.py {{{','.join(presets)}}} laptop; --help after each")
    config = settings.chosen(presets[what := sys.argv.pop(1)])
    distributed.command(lambda: learn(what, config), alone=config.lora_rank > 0)


if __name__ == "__main__":
    main()
