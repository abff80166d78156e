"""The loop: dream, score, update, look at the real web now and then. One GSPO step after the other on imagined pages.

    for each update:
        1. draw starts from recorded data                      4. advantages in each group, old log-probs
        2. dream n trajectories from each (dream.py)           5. `minibatches` GSPO steps (gspo.py)
        3. mix in experts, drop groups without a difference    6. log; sometimes evaluate on real pages; checkpoint

    python train.py tiny                       # the laptop: MiniWoB++ pages, a quarter of an hour with all its stages
    torchrun --nproc_per_node 8 train.py       # the paper's recipe

With one minibatch a batch the ratio is exactly 1 and the clip never acts; hence at least two (facts.md, section 4). Where the numbers
differ from the paper's, the reason stands at the number, in TINY.

Every random choice is a function of (seed, update, row): killed at any moment, the same command goes on from the last checkpoint and
computes what it would have computed, bit for bit on the same number of ranks. The ranks share the dreaming; then each holds the whole
batch (token ids and rewards are small), plans it alike, and scores and learns its share of the microbatches (distributed.py).
"""

import contextlib
import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

import data
import distributed
import dream
import engine
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
    """Recorded trajectories of each task on whose pages dreams may start; 0: all."""
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
    context: int = 28672
    """Prompt and answer together (paper: 32k + 16k). A sequence stands alone in its microbatch when it is longer than `tokens`, and the
    trainer, three engines and 85 GB hold no longer one (--plan)."""
    evaluate_every: int = 20
    """Updates between looks at the real web on dev seeds; 0: never."""
    evaluate_seeds: str = "1000000:4"
    """START:COUNT, of the dev range: only looked at, never learned from."""
    evaluate_horizon: int = 10
    checkpoint_every: int = 5
    keep_checkpoints: int = 2
    """The newest so many; the rest is removed."""
    sampler: str = "vllm"
    """Who samples: `vllm` (an engine on each rank, servers for world model and judge) or `transformers` (everything in this process)."""
    world_model_urls: tuple[str, ...] = ()
    """OpenAI-compatible servers of the world model (http://host:port/v1), asked in turn; none: train.py starts one over all GPUs."""
    judge_urls: tuple[str, ...] = ()
    """The same for the frozen judge."""
    policy_engine: engine.EngineConfig = field(default_factory=engine.EngineConfig)
    world_model_server: engine.ServerConfig = field(default_factory=engine.ServerConfig)
    judge_server: engine.ServerConfig = field(default_factory=lambda: engine.ServerConfig(kv_cache_gb=2.0, memory_fraction=0.1))
    sampler_gap_limit: float = 0.1
    """Stop when sampled and scored log-probs differ by more a token: a broken weight sync looks like 0.2, a healthy one like 0.02."""
    compute: str = "bfloat16"
    """Of matrix products; weights and optimizer are float32."""
    offload: bool = False
    """Keep weights, gradients and optimizer states in host memory between uses (paper: "FSDP offloading")."""
    threads: int = 0
    """CPU threads; 0 leaves it to torch."""
    plan: bool = False
    """Print what it takes of each GPU, of the host and of your time, and stop (plan.py; needs no GPU and no weights)."""
    card: str = "H100-80GB"
    """The GPU that the plan is for."""
    ranks: int = 8
    """How many of them."""
    dreaming: dream.Config = field(default_factory=dream.Config)

    def __post_init__(self):
        if self.sampler not in ("vllm", "transformers") or self.compute not in ("bfloat16", "float32"):
            raise ValueError(f"sampler is vllm or transformers, and compute bfloat16 or float32, not {self.sampler!r} and {self.compute!r}")
        if self.minibatches < 2:
            raise ValueError("minibatches: with one GSPO step a batch every ratio is exactly 1 and nothing is ever clipped; give at least 2")


TINY = Config(
    policy="runs/tiny/sft", world_model="runs/tiny/world_model", out="runs/tiny/dream", trajectories="tiny/trajectories.jsonl.gz",
    demonstrations=2, starts=400, updates=40,
    lr=3e-5,  # 3 M parameters, not 8 B: thirty times the paper's; at 1e-4 the noise of 64 dreams a batch takes back what they teach (LOG.md)
    # A laptop trajectory has about 40 tokens where the paper's has thousands, and s_i is a mean over them: its noise, and what one step
    # moves it by, are that much larger. At 3e-4 nearly every trajectory would be clipped after the first minibatch (LOG.md).
    eps_low=0.03, eps_high=0.04,
    tokens=2048, context=1024, evaluate_every=20, sampler="transformers",
    dreaming=dream.Config(tasks=8, group=8, horizon=5, expert_fraction=0.5, demonstrated=0.3, focus=True, max_new_tokens=64,
                          world_model_tokens=160, world_model_temperature=0.5, judge_tokens=160),
)


# One GPU: the same in small. Everything that is not a size is the paper's.
SINGLE = Config(
    policy="runs/single/sft", world_model="runs/single/world_model", out="runs/single/dream", tokens=8192, context=16384,
    policy_engine=engine.EngineConfig(kv_cache_gb=4.0), world_model_server=engine.ServerConfig(tensor_parallel=1, kv_cache_gb=4.0),
    judge_server=engine.ServerConfig(tensor_parallel=1, kv_cache_gb=1.0, memory_fraction=0.1), ranks=1,
    dreaming=dream.Config(max_new_tokens=2048, world_model_tokens=4096),
)


# ---- one update ------------------------------------------------------------------------------------------------------------


def update(model: lm.LM, optimizer: torch.optim.Optimizer, kept: Sequence[policy.TokenTrajectory], advantages: torch.Tensor, config: Config, rng: random.Random) -> dict:
    """config.minibatches GSPO steps on one batch, which every rank holds whole. advantages (B,) belong to `kept`. Returns metrics.

    The microbatches of each minibatch are planned and dealt to the ranks once: old and new log-probs then come from the same batches, and
    their difference is the policy's change and not the rounding of another padding. Raises ValueError when what was sampled and what is
    scored are too far apart.
    """
    temperature = config.dreaming.temperature
    order = list(range(len(kept)))
    rng.shuffle(order)
    minibatches = [order[k :: config.minibatches] for k in range(min(config.minibatches, len(order)))]
    plans = [Plan([kept[k] for k in minibatch], config.tokens) for minibatch in minibatches]
    old = [plan.logps(model, temperature) for plan in plans]
    metrics: Counter = Counter(sampler_gap=_sampler_gap(plans, old))
    if not metrics["sampler_gap"] <= config.sampler_gap_limit:  # nan is no healthy one
        raise ValueError(f"what was sampled and what is scored differ by {metrics['sampler_gap']:.3f} a token (limit {config.sampler_gap_limit}; healthy: 0.02): the sampler "
                         "has other weights than the trainer, or another temperature. Nothing was learned from this batch; the last checkpoint is good")
    for n, (minibatch, plan, old_logps) in enumerate(zip(minibatches, plans, old)):
        now = old_logps if n == 0 else plan.logps(model, temperature)
        coefficients, measured = gspo.gspo_coefficients(torch.cat(now), torch.cat(old_logps), plan.trajectory, advantages[minibatch], config.eps_low, config.eps_high)
        weights = coefficients.split([len(logp) for logp in now])
        for index, real in plan.mine:
            logp, _ = lm.token_logps(model, plan.pairs(index), temperature)
            (-(real * weights[index].to(logp.device) * logp).sum() / len(minibatch)).backward()  # summed over the ranks by FSDP
        norm = distributed.clip_grad_norm(model.model, config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        metrics["grad_norm"] += norm / len(plans)
        metrics["clip_frac"] += measured["clip_frac"] / len(plans)
        metrics["ratio_mean"] += measured["ratio_mean"] / len(plans)
        metrics["ratio_max"] = max(metrics["ratio_max"], measured["ratio_max"])
        metrics["idle"] += plan.idle / len(plans)
    return dict(metrics)


class Plan:
    """The microbatches of one minibatch, and whose they are. A turn is (trajectory within the minibatch, pair, sampled log-probs)."""

    def __init__(self, trajectories: Sequence[policy.TokenTrajectory], tokens: int):
        self.turns = [(b, pair, sampled) for b, one in enumerate(trajectories) for pair, sampled in zip(one.pairs, one.logps)]
        lengths = [len(prompt) + len(completion) for _, (prompt, completion), _ in self.turns]
        self.batches = lm.plan(lengths, tokens)
        hands = distributed.deal([sum(lengths[i] for i in batch) for batch in self.batches], distributed.world_size())
        self.mine = hands[distributed.rank()]
        self.idle = sum(not real for hand in hands for _, real in hand) / max(1, sum(map(len, hands)))
        in_order = [self.turns[i] for batch in self.batches for i in batch]
        self.trajectory = torch.tensor([b for b, (_, completion), _ in in_order for _ in completion])  # (N,)
        self.sampled = [(sampled, len(completion)) for _, (_, completion), sampled in in_order]

    def pairs(self, index: int) -> list[lm.Pair]:
        return [self.turns[i][1] for i in self.batches[index]]

    @torch.no_grad()
    def logps(self, model: lm.LM, temperature: float) -> list[torch.Tensor]:
        """The log-probabilities of every microbatch's tokens, whoever scored them, on the CPU of every rank."""
        scored = {}
        for index, real in self.mine:
            logp, _ = lm.token_logps(model, self.pairs(index), temperature)
            if real:
                scored[index] = logp.float().cpu()
        everybodys = {index: logp for part in distributed.gather(scored) for index, logp in part.items()}
        return [everybodys[index] for index in range(len(self.batches))]


def _sampler_gap(plans: Sequence[Plan], old: Sequence[list[torch.Tensor]]) -> float:
    """Mean |sampled - scored log-prob| over what was sampled (experts were not): a broken weight sync looks like 0.2, a healthy one like 0.01."""
    gaps = []
    for plan, logps in zip(plans, old):
        for scored, (sampled, length) in zip(torch.cat(logps).split([length for _, length in plan.sampled]), plan.sampled):
            if sampled:
                gaps.append((scored - torch.tensor(sampled)).abs())
    return float(torch.cat(gaps).mean()) if gaps else 0.0


def cut_metrics(file: Path, done: int) -> list[dict]:
    """Drops the lines of updates that will be computed again (and a last line that a kill cut in half); returns the rest."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["update"] < done:  # update number `done` is the next to be computed
            rows.append(row)
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(temporary, file)
    return rows


# ---- the loop --------------------------------------------------------------------------------------------------------------


FREE = ("updates", "evaluate_every", "checkpoint_every", "keep_checkpoints", "threads", "out", "tokens", "world_model_urls", "judge_urls", "policy_engine",
        "world_model_server", "judge_server", "offload", "plan", "card", "ranks")


def train(config: Config) -> None:
    # ---- 1. what is given: the SFT agent (and, frozen, the judge), the world model, recorded data ----
    out = Path(config.out)
    files = out.parent / f"{out.name}.run"
    files.mkdir(parents=True, exist_ok=True)
    main = distributed.rank() == 0
    model, actor, wm, judge_model = models(config, files)
    recorded = data.read_trajectories(config.trajectories)
    experts = dream.experts(policy.demonstrations(recorded, config.demonstrations, config.seed), config.dreaming.horizon, config.seed)
    others = []
    if config.dreaming.demonstrated < 1:
        given = world_model.first_of_each_task(recorded, config.starts)
        others = dream.first_pages(given) + dream.later_pages([t for t in given if t.reward < 1], config.seed)

    # ---- 2. or what a killed run left ----
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    checkpoints = distributed.Checkpoints(files / "checkpoint", model.model, optimizer, config.keep_checkpoints)
    done = checkpoints.load(asdict(config), FREE)
    past = distributed.gather(cut_metrics(files / "metrics.jsonl", done) if main else None)[0]
    taught: dict[str, list[bool]] = defaultdict(list)  # of each task, which groups had something to teach (dream.draw)
    for task, useful in (group for row in past for group in row.get("groups", ())):
        taught[task].append(useful)
    if main:
        print(f"resuming after update {done} of {config.updates} ({checkpoints.folder})" if done else f"{distributed.world_size()} rank(s); packed attention: {lm.PACKED_BY}")
        (files / "config.json").write_text(json.dumps(asdict(config), indent=1))
    if actor is not model:
        actor.sync(distributed.full_tensors(model.model, model.compute))

    web_or_none = Browser() if config.evaluate_every else contextlib.nullcontext()  # a node may have no Chromium
    with web_or_none as web, open(files / "metrics.jsonl" if main else os.devnull, "a") as log, \
            tqdm(total=config.updates, initial=done, desc="dreaming", unit="update", dynamic_ncols=True, disable=not main) as bar:
        for n in range(done, config.updates + 1):
            rng, row, clock = random.Random(f"{config.seed} {n}"), {"update": n}, time.time()

            # ---- 3. the real web, on dev seeds: looked at, never learned from ----
            if config.evaluate_every and (n % config.evaluate_every == 0 or n == config.updates):
                starts = evaluate.real_starts(TASKS, data.parse_seeds(config.evaluate_seeds))
                played = evaluate.play(web, actor, distributed.spread(starts), config.evaluate_horizon, config.dreaming.max_new_tokens, name="real pages")
                row["real_success"] = evaluate.success(distributed.collect(played))["success"]
                row["seconds_real"] = round(time.time() - clock, 2)
            if n == config.updates:
                _write(log, row, bar)
                break

            # ---- 4. dream: each rank a share of the rows, then every rank holds them all ----
            clock = time.time()
            rows, groups = dream.grouped(dream.draw(rng, experts, others, config.dreaming, taught), config.dreaming.group)
            seeds = [lm.mix(config.seed, n, k) for k in range(len(rows))]
            trajectories = distributed.collect(dream.dream(actor, wm, judge_model, distributed.spread(rows), config.dreaming, distributed.spread(seeds)))
            counts: Counter = Counter()
            kept = dream.keep(trajectories, groups, counts)
            useful = {groups[k] for k in kept}
            row["groups"] = [(rows[g * config.dreaming.group][0].task, g in useful) for g in range(config.dreaming.tasks)]
            for task, had in row["groups"]:
                taught[task].append(had)
            own = [t for t in trajectories if not t.expert and not t.dropped]
            row |= {"dream_success": _mean(t.reward for t in own), "experts": sum(t.expert for t in trajectories), "dropped_groups": counts["dropped groups"] / counts["groups"],
                    "dropped_dreams": counts["dropped dreams"], "truncated": _mean(t.truncated for t in own), "parse_failures": sum(t.malformed for t in own),
                    "response_tokens": _mean(len(c) for t in own for _, c in t.pairs), "steps": _mean(len(t.pairs) for t in own),
                    "judge_malformed": sum(t.verdict is not None and t.verdict.malformed for t in own), "kept": len(kept), "seconds_dream": round(time.time() - clock, 2)}

            # ---- 5. update, unless no group has anything to teach; all ranks see the same batch and decide alike ----
            clock = time.time()
            if kept:
                rewards = torch.tensor([trajectories[k].reward for k in kept])
                advantages = gspo.group_advantages(rewards, torch.tensor([groups[k] for k in kept]))
                model.model.train()
                row |= update(model, optimizer, [trajectories[k] for k in kept], advantages, config, rng)
                model.model.eval()
                if actor is not model:
                    actor.sync(distributed.full_tensors(model.model, model.compute))
            row["seconds_update"] = round(time.time() - clock, 2)

            # ---- 6. log, keep ----
            _write(log, row, bar)
            checkpoints.settle()
            if (n + 1) % config.checkpoint_every == 0 or n + 1 == config.updates:
                if main:
                    dream.dump(files / "dreams.txt", trajectories)
                checkpoints.save(n + 1, asdict(config))
    checkpoints.settle(wait=True)
    lm.save(model, out)
    if main:
        plot(files / "metrics.jsonl", files / "curve.png")
        print(f"the agent: {out}   the curve: {files / 'curve.png'}   some dreams: {files / 'dreams.txt'}")


def models(config: Config, files: Path) -> tuple[lm.LM, object, world_model.WorldModel, object]:
    """(the trainer's model, what acts, the world model, the judge). In one process without vLLM what is trained is what acts; else a
    replica or an engine on each rank does, and takes over the weights after every update."""
    sharded, compute = distributed.world_size() > 1 or config.sampler == "vllm", getattr(torch, config.compute)
    if sharded:
        model = lm.load_sharded(config.policy, "python policy.py tiny", config.context, compute, config.offload)
    else:
        model = lm.load(config.policy, "python policy.py tiny", config.context, compute)
    if config.sampler == "vllm":
        ask = {"world_model": (config.world_model, config.world_model_urls, config.world_model_server)}
        if config.dreaming.judge == "policy":
            ask["judge"] = (config.policy, config.judge_urls, config.judge_server)
        answers = engine.start(ask, config.context, files)  # before the engine: servers measure what is free, and it would take that
        world, frozen = answers["world_model"], answers.get("judge")
        actor = engine.Engine(config.policy, config.context, config.compute, config.policy_engine)
    else:
        actor = lm.load(config.policy, "", config.context, compute) if sharded else model
        world = lm.load(config.world_model, "python world_model.py tiny", config.context, compute)
        frozen = lm.load(config.policy, "", config.context, compute) if config.dreaming.judge == "policy" else None
    wm = world_model.WorldModel(world, config.dreaming.world_model_tokens, config.dreaming.world_model_temperature)
    return model, actor, wm, {"policy": frozen, "current": actor, "world_model": world}[config.dreaming.judge]


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
    configs = {"tiny": ("the laptop: MiniWoB++ pages, two CPU cores", TINY), "single": ("one GPU of 48 to 80 GB: a policy of 1B, a world model of 3B", SINGLE), "paper": ("8 x H100: the paper's recipe", Config())}
    config = lm.chosen(configs)
    if config.plan:
        import plan

        try:
            print(plan.train_plan(config, config.card, config.ranks))
        except ValueError as error:
            sys.exit(f"train.py --plan: {error}")
        return
    if config.policy in (Config.policy, SINGLE.policy) and not torch.cuda.is_available():
        sys.exit("The paper's recipe needs a node of GPUs, and there is none here; the recipe for a laptop is: python train.py tiny")
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        distributed.init(alone=config.sampler == "vllm")
        train(config)
    except (ValueError, OSError, engine.EngineError) as error:
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":
    main()
