"""The loop: dream, score, update, look at the real web now and then. One GSPO step after the other on imagined pages.

    for each update:
        1. draw starts from recorded data                      4. advantages in each group, old log-probs
        2. dream n trajectories from each (dream.py)           5. `minibatches` GSPO steps (gspo.py)
        3. mix in experts, drop groups without a difference    6. log; sometimes evaluate on real pages; checkpoint

    python train.py tiny                       # the laptop: MiniWoB++ pages, a quarter of an hour with all its stages
    torchrun --nproc_per_node 8 train.py       # the paper's recipe

With one minibatch a batch the ratio is exactly 1 and the clip never acts; hence at least two (facts.md, section 4). Where the numbers
differ from the paper's, the reason stands at the number, in TINY.

Every random choice is a function of (seed, update): killed at any moment, the same command goes on from the last checkpoint and computes
what it would have computed, bit for bit on one process.
"""

import json
import os
import pickle
import random
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

import data
import dream
import evaluate
import gspo
import lm
import policy
import world_model
from browser import TASKS, Browser


@dataclass(frozen=True)
class Config:
    """The dreaming."""

    policy: str = "stanfordnlp/llama8b-nnetnav-live"
    """Folder of the SFT agent: where training starts, and the frozen judge."""
    world_model: str = "runs/paper/world_model"
    """Folder of the world model."""
    out: str = "runs/paper/dream"
    """Folder of the result; the run's files stand beside it: metrics.jsonl, dreams.txt, checkpoint/, config.json, curve.png."""
    trajectories: str = "nnetnav-live/train.jsonl"
    """Recorded trajectories: the experts and the starts."""
    demonstrations: int = 0
    """Successes of each task that were cloned (they are the experts); 0: all. Must be what the SFT agent was trained on."""
    starts: int = 0
    """Recorded trajectories of each task whose first pages dreams may start from; 0: all."""
    seed: int = 0
    """Of the run; `demonstrations` are drawn with it too."""
    updates: int = 1000
    """Batches of dreams."""
    minibatches: int = 4
    """GSPO steps a batch (GSPO paper: 4)."""
    lr: float = 1e-6
    """Constant (paper: 1e-6)."""
    eps_low: float = 3e-4
    eps_high: float = 4e-4
    clip_norm: float = 1.0
    tokens: int = 16384
    """Tokens a microbatch, padding counted."""
    context: int = 49152
    """Prompt and answer together (paper: 32k + 16k)."""
    evaluate_every: int = 20
    """Updates between looks at the real web on dev seeds; 0: never."""
    evaluate_seeds: str = "1000000:4"
    """START:COUNT, of the dev range: only looked at, never learned from."""
    evaluate_horizon: int = 10
    checkpoint_every: int = 5
    threads: int = 0
    """CPU threads; 0 leaves it to torch."""
    dreaming: dream.Config = field(default_factory=dream.Config)

    def __post_init__(self):
        if self.minibatches < 2:
            raise ValueError("minibatches: with one GSPO step a batch every ratio is exactly 1 and nothing is ever clipped; give at least 2")


TINY = Config(
    policy="runs/tiny/sft", world_model="runs/tiny/world_model", out="runs/tiny/dream", trajectories="tiny/trajectories.jsonl.gz",
    demonstrations=10, starts=400, updates=16,
    lr=1e-4,  # 3 M parameters in fp32, not 8 B: 100 times the paper's
    # A laptop trajectory has about 100 tokens where the paper's has thousands, and s_i is a mean over them: its noise, and what one step
    # moves it by, are that much larger. At 3e-4 nearly every trajectory would be clipped after the first minibatch (LOG.md).
    eps_low=0.03, eps_high=0.04,
    tokens=2048, context=1024, evaluate_every=8,
    dreaming=dream.Config(tasks=8, group=8, horizon=5, expert_fraction=0.5, demonstrated=0.3, temperature=1.0, max_new_tokens=64,
                          world_model_tokens=160, world_model_temperature=0.5, judge_tokens=160),
)


# ---- one update ------------------------------------------------------------------------------------------------------------


def update(model: lm.LM, optimizer: torch.optim.Optimizer, kept: Sequence[policy.TokenTrajectory], advantages: torch.Tensor, config: Config, rng: random.Random) -> dict:
    """config.minibatches GSPO steps on one batch. advantages (B,) belong to `kept`. Returns metrics.

    The microbatches of each minibatch are planned once: old and new log-probs then come from the same batches, and their difference is
    the policy's change and not the rounding of another padding.
    """
    temperature = config.dreaming.temperature
    order = list(range(len(kept)))
    rng.shuffle(order)
    minibatches = [order[k :: config.minibatches] for k in range(config.minibatches)]
    minibatches = [minibatch for minibatch in minibatches if minibatch]
    plans = []
    for minibatch in minibatches:
        turns = [(b, pair) for b, k in enumerate(minibatch) for pair in kept[k].pairs]  # b: trajectory within the minibatch
        plans.append((turns, lm.plan([len(p) + len(c) for _, (p, c) in turns], config.tokens)))
    old = [_no_grad_logps(model, turns, batches, temperature) for turns, batches in plans]
    sampled = [abs(new - then) for (turns, batches), logps, minibatch in zip(plans, old, minibatches) for new, then in _sampler_gap(kept, minibatch, batches, turns, logps)]
    metrics: Counter = Counter()
    for n, (minibatch, (turns, batches), old_logps) in enumerate(zip(minibatches, plans, old)):
        now = old_logps if n == 0 else _no_grad_logps(model, turns, batches, temperature)
        flat = lambda pieces: torch.cat(pieces)
        trajectory = torch.cat([torch.tensor([turns[i][0] for i in batch])[row] for batch, (_, row) in zip(batches, now)]).to(model.device)  # (N,)
        coefficients, measured = gspo.gspo_coefficients(flat([logp for logp, _ in now]), flat([logp for logp, _ in old_logps]), trajectory,
                                                        advantages[minibatch].to(model.device), config.eps_low, config.eps_high)
        for batch, weights in zip(batches, coefficients.split([len(logp) for logp, _ in now])):
            logp, _ = lm.token_logps(model, [turns[i][1] for i in batch], temperature)
            (-(weights * logp).sum() / len(minibatch)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        metrics["grad_norm"] += float(norm) / len(minibatches)
        metrics["clip_frac"] += measured["clip_frac"] / len(minibatches)
        metrics["ratio_mean"] += measured["ratio_mean"] / len(minibatches)
        metrics["ratio_max"] = max(metrics["ratio_max"], measured["ratio_max"])
    metrics["sampler_gap"] = sum(sampled) / max(1, len(sampled))
    return dict(metrics)


@torch.no_grad()
def _no_grad_logps(model: lm.LM, turns, batches, temperature: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [lm.token_logps(model, [turns[i][1] for i in batch], temperature) for batch in batches]


def _sampler_gap(kept, minibatch, batches, turns, logps):
    """(scored, sampled) log-prob of every sampled token: a broken sampler shows here before it shows anywhere else."""
    sampled = {id(pair): then for k in minibatch for pair, then in zip(kept[k].pairs, kept[k].logps) if then}
    for batch, (logp, row) in zip(batches, logps):
        for place, i in enumerate(batch):
            then = sampled.get(id(turns[i][1]))
            if then:
                yield from zip(logp[row == place].tolist(), then)


# ---- state -----------------------------------------------------------------------------------------------------------------


def save_checkpoint(folder: Path, model: lm.LM, optimizer: torch.optim.Optimizer, done: int, config: Config) -> None:
    """All that the next update depends on, written beside and renamed."""
    temporary = folder.with_suffix(".tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.model.state_dict(), "optimizer": optimizer.state_dict(), "updates": done, "config": asdict(config)}, temporary)
    os.replace(temporary, folder)


def load_checkpoint(file: Path, model: lm.LM, optimizer: torch.optim.Optimizer, config: Config) -> int:
    """Restores model and optimizer; returns the updates done. Raises ValueError when the file is another run's."""
    try:
        if not zipfile.is_zipfile(file):  # torch would take anything else for its old format, and fail in a hundred ways
            raise EOFError("cut off, or no checkpoint at all")
        state = torch.load(file, map_location=model.device, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} cannot be read ({error}); delete it to start again") from error
    now = asdict(config)
    # How long to go on, and how often to look, may change between a run and its continuation; what was computed may not.
    free = {"updates", "evaluate_every", "checkpoint_every", "threads", "out"}
    if changed := [key for key in now if key not in free and _plain(state["config"].get(key)) != _plain(now[key])]:
        raise ValueError(f"{file} is from another config ({', '.join(changed)} changed); give another --out, or delete it to start again")
    model.model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["updates"]


def _plain(value):
    return json.loads(json.dumps(value))


def cut_metrics(file: Path, done: int) -> None:
    """Drops the lines of updates that will be computed again (and a last line that a kill cut in half)."""
    if not file.exists():
        return
    rows = []
    for line in file.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["update"] < done:  # update number `done` is the next to be computed
            rows.append(line + "\n")
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(rows))
    os.replace(temporary, file)


# ---- the loop --------------------------------------------------------------------------------------------------------------


def train(config: Config) -> None:
    # ---- 1. what is given: the SFT agent (and, frozen, the judge), the world model, recorded data ----
    out = Path(config.out)
    files = out.parent / f"{out.name}.run"
    files.mkdir(parents=True, exist_ok=True)
    model = lm.load(config.policy, "python policy.py tiny", config.context)
    wm = world_model.WorldModel(lm.load(config.world_model, "python world_model.py tiny", config.context), config.dreaming.world_model_tokens, config.dreaming.world_model_temperature)
    frozen = lm.load(config.policy, context=config.context) if config.dreaming.judge == "policy" else None
    judge_model = {"policy": frozen, "current": model, "world_model": wm.lm}[config.dreaming.judge]
    recorded = data.read_trajectories(config.trajectories)
    experts = dream.experts(policy.demonstrations(recorded, config.demonstrations, config.seed), config.dreaming.horizon, config.seed)
    others = dream.first_pages(world_model.first_of_each_task(recorded, config.starts)) if config.dreaming.demonstrated < 1 else []

    # ---- 2. or what a killed run left ----
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    checkpoint, done = files / "checkpoint.pt", 0
    if checkpoint.exists():
        done = load_checkpoint(checkpoint, model, optimizer, config)
        print(f"resuming after update {done} of {config.updates} ({checkpoint})")
    cut_metrics(files / "metrics.jsonl", done)
    (files / "config.json").write_text(json.dumps(asdict(config), indent=1))

    with Browser() as web, open(files / "metrics.jsonl", "a") as log, tqdm(total=config.updates, initial=done, desc="dreaming", unit="update", dynamic_ncols=True) as bar:
        for n in range(done, config.updates + 1):
            rng, row, clock = random.Random(f"{config.seed} {n}"), {"update": n}, time.time()

            # ---- 3. the real web, on dev seeds: looked at, never learned from ----
            if config.evaluate_every and n % config.evaluate_every == 0 or n == config.updates:
                starts = evaluate.real_starts(TASKS, data.parse_seeds(config.evaluate_seeds))
                played = evaluate.play(web, model, starts, config.evaluate_horizon, config.dreaming.max_new_tokens, name="real pages")
                row["real_success"] = evaluate.success(played)["success"]
                row["seconds_real"] = round(time.time() - clock, 2)
            if n == config.updates:
                _write(log, row, bar)
                break

            # ---- 4. dream ----
            clock = time.time()
            world = dream.Dream(wm, judge_model, config.dreaming, seed=config.seed * 1_000_000 + n)
            chosen = dream.draw(rng, experts, others, config.dreaming)
            trajectories, groups = dream.dream(model, world, chosen, config.dreaming, seed=config.seed * 1_000_000 + n)
            counts: Counter = Counter()
            kept = dream.keep(trajectories, groups, counts)
            own = [t for t in trajectories if not t.expert and not t.dropped]
            row |= {"dream_success": _mean(t.reward for t in own), "experts": sum(t.expert for t in trajectories), "dropped_groups": counts["dropped groups"] / counts["groups"],
                    "dropped_dreams": counts["dropped dreams"], "truncated": _mean(t.truncated for t in own), "parse_failures": sum(t.malformed for t in own),
                    "response_tokens": _mean(len(c) for t in own for _, c in t.pairs), "steps": _mean(len(t.pairs) for t in own),
                    "judge_malformed": world.counts["judge malformed"], "kept": len(kept), "seconds_dream": round(time.time() - clock, 2)}

            # ---- 5. update, unless no group has anything to teach ----
            clock = time.time()
            if kept:
                rewards = torch.tensor([trajectories[k].reward for k in kept])
                advantages = gspo.group_advantages(rewards, torch.tensor([groups[k] for k in kept]))
                model.model.train()
                row |= update(model, optimizer, [trajectories[k] for k in kept], advantages, config, rng)
                model.model.eval()
            row["seconds_update"] = round(time.time() - clock, 2)

            # ---- 6. log, keep ----
            _write(log, row, bar)
            if (n + 1) % config.checkpoint_every == 0 or n + 1 == config.updates:
                dream.dump(files / "dreams.txt", trajectories, world)
                save_checkpoint(checkpoint, model, optimizer, n + 1, config)
    lm.save(model, out)
    plot(files / "metrics.jsonl", files / "curve.png")
    print(f"the agent: {out}   the curve: {files / 'curve.png'}   some dreams: {files / 'dreams.txt'}")


def _mean(values) -> float:
    values = list(values)
    return round(sum(values) / len(values), 4) if values else 0.0


def _write(log, row: dict, bar: tqdm) -> None:
    log.write(json.dumps(row) + "\n")
    log.flush()
    shown = {key: f"{row[key]:.2f}" for key in ("dream_success", "real_success") if key in row}
    bar.set_postfix(shown, refresh=False)
    if "real_success" in row:
        bar.write(f"update {row['update']:4d}  real success on dev seeds {row['real_success']:.3f}")
    bar.update(row["update"] + 1 - bar.n if "dream_success" in row else 0)


def plot(metrics: Path, file: Path) -> None:
    """Real and dream success over the updates, side by side: a dream that rises alone is a judge being fooled."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(7, 4))
    dreams = [(row["update"], row["dream_success"]) for row in rows if "dream_success" in row]
    smooth = [sum(value for _, value in dreams[max(0, k - 4) : k + 1]) / len(dreams[max(0, k - 4) : k + 1]) for k in range(len(dreams))]
    axes.plot([n for n, _ in dreams], [value for _, value in dreams], color="C0", alpha=0.25)
    axes.plot([n for n, _ in dreams], smooth, color="C0", label="in dreams, judged by the agent (sampled)")
    real = [(row["update"], row["real_success"]) for row in rows if "real_success" in row]
    axes.plot(*zip(*real), "o-", color="C3", label="on real pages, dev seeds (greedy)")
    axes.set(xlabel="update", ylabel="success", ylim=(0, 1))
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main():
    import tyro

    configs = {"tiny": ("the laptop: MiniWoB++ pages, two CPU cores", TINY), "paper": ("8 x H100: the paper's recipe", Config())}
    config = tyro.extras.overridable_config_cli(configs, args=sys.argv[1:] or ["paper"])
    if config.policy == Config.policy and not torch.cuda.is_available():
        sys.exit("The paper's recipe needs a node of GPUs, and there is none here; the recipe for a laptop is: python train.py tiny")
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        train(config)
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":
    main()
