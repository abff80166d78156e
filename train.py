"""The loop: dream, score, update, look at the real web now and then. One GSPO step after the other on
imagined pages.

    for each update:
        1. look at the real web, sometimes (evaluate.py)
        2. dream n trajectories from each of a few starts, experts mixed in (dream.py)
        3. advantages in each group, old log-probs, `minibatches` GSPO steps (gspo.py)
        4. log; checkpoint

    python train.py tiny                       # the laptop: MiniWoB++ pages
    python train.py tiny --world real          # the same on real pages: no world model and no judge
    torchrun --nproc_per_node 8 train.py       # the paper's recipe

With --world both a share of the groups is done on real pages and the rest dreamed, as Dyna mixes real and
imagined experience (Sutton 1991). Real steps are counted (`real_steps`), since they are what dreams save.

With one minibatch a batch the ratio is exactly 1 and the clip never acts; hence at least two (NOTES 4.2).

Every random choice is a function of (seed, update, row). Killed at any moment, the same command goes on from
the last checkpoint and computes what it would have computed; on a CPU bit for bit, on the same number of
ranks. The ranks share the dreaming. Then each holds the whole batch (token ids and rewards are small), plans
it alike, and scores and learns its share of the microbatches (distributed.py).

Shapes: K kept trajectories of a batch; B of a minibatch; N tokens that the agent wrote, of a minibatch.
"""

import contextlib
import json
import math
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from tqdm import tqdm

import attention
import benchmarks
import data
import distributed
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
    """Folder of the result. Beside it OUT.run/: metrics.jsonl, dreams.txt, checkpoint/, config.json,
    curve.png."""
    trajectories: str = "nnetnav-live/train.jsonl"
    """Recorded trajectories: the experts and the starts."""
    world: str = "dream"
    """Where the agent learns: `dream`; `real` (real pages and their own reward, neither world model nor
    judge), or `both`. Real pages are the recorded ones, reset by task and seed: MiniWoB++'s, or those of
    --benchmark."""
    on: Annotated[benchmarks.Options, tyro.conf.arg(name="")] = field(default_factory=benchmarks.Options)
    """Other people's pages in place of MiniWoB++'s, also to be looked at."""
    real_fraction: float = 0.5
    """With `both`: chance of each group to be on real pages."""
    demonstrations: int = 0
    """Successes of each task that the SFT agent was cloned from: they are the experts. 0: all. As in
    policy.py."""
    demonstrations_seed: int = 0
    """Which demonstrations: the number that policy.py and world_model.py were given."""
    seed: int = 0
    """Of every random choice of this run: windows, starts, dreams, order. With another number the same agent
    goes on from the same demonstrations with other dice."""
    updates: int = 1000
    """Batches of dreams."""
    epochs: float = 0.0
    """Passes over the tasks that dreams start from, instead of `updates` (paper: 10 of a set that it does not
    name, NOTES 1.5); 0: so many updates. Tasks are drawn at random: a pass is as many draws as tasks."""
    minibatches: int = 4
    """GSPO steps a batch (GSPO paper: 4)."""
    lr: float = 1e-6
    """Constant (paper: 1e-6)."""
    eps_low: float = 3e-4
    """Clip (GSPO paper, section 5.1)."""
    eps_high: float = 4e-4
    """Clip (GSPO paper, section 5.1)."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    tokens: int = 16384
    """Tokens a microbatch, padding counted."""
    context: int = 24576
    """Of the policy, tokens of prompt and answer (paper: 32k + 16k). A dream whose page is longer is dropped.
    A sequence longer than `tokens` gets a microbatch of its own: some GB of 85 are free beside it (python -m
    node.plan)."""
    world_model_context: int = 40960
    """Of the world model: a page that the policy can read, and an answer that writes out a whole page. It is
    longer than the policy's, as nothing is learned at this length, and its server's KV cache is sized for
    it. (Servers of --world-model-urls and --judge-urls have contexts of their own.)"""
    judge_context: int = 49152
    """Of the frozen judge, which reads two such pages. Another judge (--dreaming.judge) has the context of
    the policy or of the world model, which it is."""
    evaluate_every: int = 20
    """Updates between looks at the real web on dev seeds; 0: never."""
    evaluate_seeds: str = "1000000:4"
    """START:COUNT, of the dev range: only looked at, never learned from."""
    evaluate_horizon: int = 10
    """Steps of a trajectory on real pages."""
    checkpoint_every: int = 5
    """Updates."""
    keep_checkpoints: int = 2
    """The newest so many; the rest is removed."""
    sampler: str = "vllm"
    """Who samples: `vllm` (an engine on each rank, servers for world model and judge) or `transformers` (all
    in this process)."""
    world_model_urls: tuple[str, ...] = ()
    """OpenAI-compatible servers of the world model (http://host:port/v1), asked in turn; none: train.py
    starts one over all GPUs."""
    judge_urls: tuple[str, ...] = ()
    """The same for the frozen judge."""
    policy_engine: lm.EngineConfig = field(default_factory=lm.EngineConfig)
    """vLLM in each rank: samples for the policy."""
    world_model_server: lm.ServerConfig = field(default_factory=lm.ServerConfig)
    """The server that train.py starts for the world model."""
    judge_server: lm.ServerConfig = field(default_factory=lambda: lm.ServerConfig(kv_cache_gb=2.0))
    """The same for the frozen judge."""
    sampler_gap_limit: float = 0.1
    """Stop when sampled and scored log-probs differ by more a token: a broken weight sync is near 0.2, a
    healthy one near 0.02."""
    drop_limit: float = 0.5
    """Stop when a larger share of the dreams of the first three updates was dropped, as somebody could not
    read or imagine them (dream.py), or of their verdicts could not be read. 1: never."""
    compute: str = "bfloat16"
    """Of matrix products: bfloat16, float32, or auto, the faster one here (lm.matrix_type). Weights and
    optimizer are float32."""
    offload: bool = False
    """Keep weights, gradients and optimizer states in host memory between uses (paper: "FSDP offloading")."""
    dreaming: dream.Config = field(default_factory=dream.Config)
    """How the agent dreams."""
    preflight: bool = False
    """Look whether all is there for the run, say what was found, and stop."""

    def __post_init__(self):
        if self.sampler not in ("vllm", "transformers"):
            raise ValueError(f"sampler is vllm or transformers, not {self.sampler!r}")
        if self.world not in ("dream", "real", "both"):
            raise ValueError(f"world is dream, real or both, not {self.world!r}")
        if not 0 <= self.real_fraction <= 1:
            raise ValueError("real_fraction is a share: give it a value from 0 to 1")
        if self.compute not in ("bfloat16", "float32", "auto"):
            raise ValueError(f"compute is bfloat16, float32 or auto, not {self.compute!r}")
        if self.minibatches < 2:
            raise ValueError("minibatches: with one GSPO step a batch every ratio is exactly 1 and nothing "
                             "is ever clipped; give at least 2")
        try:
            data.seeds_to_look_at(self.evaluate_seeds)
        except ValueError as error:
            raise ValueError(f"--evaluate-seeds: {error}") from error
        if self.epochs < 0:
            raise ValueError(f"epochs {self.epochs:g}: give passes over the tasks, or 0 to count --updates")

    @property
    def real_share(self) -> float:
        """Of the groups. Below 1 world model and judge are needed, above 0 a browser."""
        return {"dream": 0.0, "real": 1.0, "both": self.real_fraction}[self.world]


# One GPU of 80 GB: the same in small. Everything that is not a size is the paper's. A smaller card takes
# flags besides: python -m node.plan single --card L40S-48GB says which (node/plan.py, SMALLER).
SINGLE = Config(
    policy="runs/single/sft", world_model="runs/single/world_model", out="runs/single/dream",
    tokens=8192, context=16384, world_model_context=24576, judge_context=32768,
    policy_engine=lm.EngineConfig(kv_cache_gb=3.0),
    world_model_server=lm.ServerConfig(tensor_parallel=1, kv_cache_gb=12.0),
    judge_server=lm.ServerConfig(tensor_parallel=1, kv_cache_gb=3.0),
    # The world model reads every page that the agent reads: 16384 - 2048 = 24576 - 10240.
    dreaming=dream.Config(max_new_tokens=2048, world_model_tokens=10240),
)

# What a resumed run may have otherwise than the checkpoint that it goes on from: it changes no result, or
# only how far the run goes; or, of the contexts, which pages fit: who ran out of memory needs a shorter one.
MAY_CHANGE = ("updates", "epochs", "evaluate_every", "checkpoint_every", "keep_checkpoints", "out", "tokens",
              "offload", "context", "world_model_context", "judge_context", "drop_limit", "world_model_urls",
              "judge_urls", "policy_engine", "world_model_server", "judge_server", "preflight")

FEW_VERDICTS = 8  # fewer say nothing of the judge: an agent that hardly ever ends is judged hardly ever

# What to raise or change for each cause of dropped dreams (dream.measure's `drops`).
WAYS_OUT = {"policy: too long": "--context", "world model: too long": "--world-model-context",
            "world model: cut off": "--dreaming.world-model-tokens",
            "world model: unreadable": "another --world-model", "judge: cut off": "--dreaming.judge-tokens",
            "judge: unreadable": "another --dreaming.judge",
            "browser: failed": "fewer programs beside it"}


# ---- one update --------------------------------------------------------------------------------------------


Turn = tuple[int, lm.Pair, Sequence[float]]  # (its trajectory in the minibatch, the pair, a number a token)
# (logp (N,), old_logp (N,), trajectory (N,), advantages (B,), eps_low, eps_high) -> (coefficients (N,),
# metrics), as gspo.gspo_coefficients. The minibatch's loss is -1/B sum_t coefficient_t logp_t.
Rule = Callable[..., tuple[torch.Tensor, dict[str, float]]]


class Minibatch:
    """Turns of one GSPO step in microbatches, dealt to the ranks, and whose they are.

    `turns` are kept in the order of the microbatches. A turn carries one number a token: the sampler's
    log-probs when it is scored, Eq. 10's coefficients when it is learned from. N tokens that the agent wrote,
    of all turns.
    """

    def __init__(self, turns: Sequence[Turn], tokens: int):
        lengths = [len(prompt) + len(completion) for _, (prompt, completion), _ in turns]
        microbatches = lm.microbatches(lengths, tokens)  # lists of indices into turns
        self.costs = [sum(lengths[i] for i in microbatch) for microbatch in microbatches]  # in tokens
        # (microbatch, weight). Weight 0: learned from by another rank, and run here to keep in step with it.
        self.mine = distributed.deal(self.costs, distributed.world_size())[distributed.rank()]
        self.microbatches = [[turns[i] for i in microbatch] for microbatch in microbatches]
        self.turns = [turn for microbatch in self.microbatches for turn in microbatch]
        self.sizes = [len(completion) for _, (_, completion), _ in self.turns]  # N of each turn
        owners = [b for b, (_, completion), _ in self.turns for _ in completion]
        self.trajectory = torch.tensor(owners, dtype=torch.long)  # (N,)

    def logps(self, index: int, model: lm.LM, temperature: float) -> torch.Tensor:
        """log pi_theta (N of this microbatch,) of microbatch `index`, with gradient."""
        return lm.token_logps(model, [pair for _, pair, _ in self.microbatches[index]], temperature)[0]

    @torch.no_grad()
    def score(self, model: lm.LM, temperature: float) -> torch.Tensor:
        """log pi_theta (N,) of all its tokens, whoever scored them, on the CPU of every rank."""
        scored = {}
        for index, weight in self.mine:
            logp = self.logps(index, model, temperature)
            if weight:
                scored[index] = logp.float().cpu()
        of_all_ranks = {index: logp for part in distributed.gather(scored) for index, logp in part.items()}
        return torch.cat([of_all_ranks[index] for index in range(len(self.microbatches))])

    def to_learn(self, coefficients: torch.Tensor, tokens: int) -> "Minibatch":
        """The turns whose coefficients (N,) are not 0, planned anew, with their coefficients. A trajectory
        that is clipped, or has no advantage, needs no backward pass."""
        pieces = coefficients.split(self.sizes)
        left = [(b, pair, piece) for (b, pair, _), piece in zip(self.turns, pieces) if piece.any()]
        return Minibatch(left, tokens)


def update(model: lm.LM, optimizer: torch.optim.Optimizer, kept: Sequence[policy.TokenTrajectory],
           advantages: torch.Tensor, config: Config, rng: random.Random, rule: Rule | None = None) -> dict:
    """config.minibatches GSPO steps on one batch, which every rank holds whole. advantages (K,) belong to
    `kept`. `rule`: another loss in GSPO's place (rivals/ratios.py).

    Returns metrics. Raises ValueError when what was sampled and what is scored are too far apart.
    """
    rule, temperature = rule or gspo.gspo_coefficients, config.dreaming.temperature
    order = list(range(len(kept)))
    rng.shuffle(order)
    parts = [order[k :: config.minibatches] for k in range(min(config.minibatches, len(order)))]
    # Planned once: old and new log-probs come from the same microbatches. Their difference is the policy's
    # change, and not the rounding of another padding.
    minibatches = [Minibatch([(b, pair, sampled) for b, k in enumerate(part)
                              for pair, sampled in zip(kept[k].pairs, kept[k].logps)], config.tokens)
                   for part in parts]
    old_logps = [minibatch.score(model, temperature) for minibatch in minibatches]  # (N,) each
    costs = [minibatch.costs for minibatch in minibatches]  # of every pass, for `idle`
    metrics: Counter = Counter(sampler_gap=sampler_gap(minibatches, old_logps))
    if not metrics["sampler_gap"] <= config.sampler_gap_limit:  # nan is not healthy either
        raise ValueError(
            f"what was sampled and what is scored differ by {metrics['sampler_gap']:.3f} a token (limit "
            f"{config.sampler_gap_limit}; healthy: 0.02): the sampler has other weights than the trainer, or "
            "another temperature. Nothing was learned from this batch; the last checkpoint is good")

    for step, (part, minibatch, old_logp) in enumerate(zip(parts, minibatches, old_logps)):
        logp = minibatch.score(model, temperature) if step else old_logp  # (N,); equal before the first step
        coefficients, measured = rule(logp, old_logp, minibatch.trajectory, advantages[part], config.eps_low,
                                      config.eps_high)  # (N,)
        learned = minibatch.to_learn(coefficients, config.tokens)
        # Forward, forward again, backward: 1, 1, 2.
        costs += [minibatch.costs] * (step > 0) + [learned.costs] * 4
        for index, weight in learned.mine:
            logp = learned.logps(index, model, temperature)  # (N of this microbatch,)
            coefficient = torch.cat([piece for _, _, piece in learned.microbatches[index]]).to(logp.device)
            loss = -weight * (coefficient * logp).sum() / len(part)  # Eq. 10
            loss.backward()  # the ranks' gradients are summed (distributed.shard)
        if not learned.mine:  # on no rank: all plan alike. Adam still moves, by its momentum
            distributed.zero_gradients(model.model)
        norm = distributed.clip_grad_norm(model.model, config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        metrics["ratio_max"] = max(metrics["ratio_max"], measured["ratio_max"])
        for name in ("clip_frac", "ratio_mean", "abs_log_ratio"):
            metrics[name] += measured[name] / len(minibatches)
        metrics["grad_norm"] += norm / len(minibatches)
    metrics["idle"] = distributed.idle(costs, distributed.world_size())
    torch.cuda.empty_cache()  # or a server that died while we learned finds no memory; without a GPU: nothing
    return dict(metrics)


def sampler_gap(minibatches: Sequence[Minibatch], scored: Sequence[torch.Tensor]) -> float:
    """Mean |sampled - scored log-prob| of a token, over what was sampled (experts were not).

    A broken weight sync looks like 0.2, a healthy one like 0.01 (NOTES 7.5).
    """
    gaps = []
    for minibatch, logps in zip(minibatches, scored):
        for (_, _, sampled), logp in zip(minibatch.turns, logps.split(minibatch.sizes)):
            if sampled:
                gaps.append((logp - torch.tensor(sampled)).abs())
    return float(torch.cat(gaps).mean()) if gaps else 0.0


def sampled_by_all(before: int) -> int:
    """Tokens that agent, world model and judge have sampled on all ranks since this rank's
    lm.tokens_sampled() was `before`."""
    return sum(distributed.gather(lm.tokens_sampled() - before))


def check_drops(past: Sequence[dict], config: Config) -> None:
    """Raise ValueError after the dreams of the third update when too many dreams of the three were dropped,
    or too many of their verdicts could not be read. `past`: the metrics of all updates so far, the last that
    of this update."""
    if len(past) != 3:
        return
    drops: Counter = Counter()
    for metrics in past:
        drops.update(metrics.get("drops", {}))  # a log from before there were drops has none
    dreams, real, judged, malformed = (
        sum(metrics.get(name, 0) for metrics in past)
        for name in ("dreams", "real_trajectories", "judged", "judge_malformed"))
    done, few = dreams + real, judged < FEW_VERDICTS
    if drops.total() > config.drop_limit * done or (malformed > config.drop_limit * judged and not few):
        judges = {"policy": "--judge-context", "current": "--context", "world_model": "--world-model-context"}
        ways = WAYS_OUT | {"judge: too long": judges[config.dreaming.judge]}
        causes = ", ".join(f"{count} {cause} ({ways[cause]})" for cause, count in drops.most_common())
        raise ValueError(
            f"{drops.total()} of {done} {'trajectories' if real else 'dreams'} of the first three updates "
            f"were dropped, and {malformed} of {judged} verdicts could not be read (limit "
            f"{config.drop_limit:g}). By cause, and what to raise or change (with another --out, where a "
            f"checkpoint was written): {causes}. Or give --drop-limit 1 to go on with what is left")


# ---- the loop ----------------------------------------------------------------------------------------------


def train(config: Config, rule: Rule | None = None,
          advantages_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
          gather: Callable[[Callable[[int], dream.Batch], Config], dream.Batch] = lambda make, _: make(0)
          ) -> None:
    """The run from its first update, or from its last checkpoint, to its last. All ranks call it.

    The rest is for rivals/ratios.py. `rule`: another loss in GSPO's place (update). `advantages_of`: other
    advantages than gspo.group_advantages, called alike. `gather(make, config)` gives what an update learns
    from: make(0) draws and dreams a batch, make(1) one more, with other seeds.
    """
    advantages_of = advantages_of or gspo.group_advantages  # Eq. 6
    # ---- what is given: the SFT agent (and, frozen, the judge), the world model, recorded data ----
    out = Path(config.out)
    files = out.parent / f"{out.name}.run"
    files.mkdir(parents=True, exist_ok=True)
    first_rank = distributed.rank() == 0
    given = starts(config)  # before the models: a file without a success is soon read
    model, actor, imagination, judge_model = models(config, files)
    experts, others = fitting(model, *given, config)
    tasks = len({start.task for start in [expert.start for expert in experts] + others})
    config = replace(config, updates=count_updates(config, tasks))

    # ---- or what a killed run left ----
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0,
                                  fused=True)
    folder = files / "checkpoint"
    checkpoints = distributed.Checkpoints(folder, model.model, optimizer, config.keep_checkpoints)
    done = checkpoints.load(asdict(config), MAY_CHANGE)
    past = distributed.gather(cut_metrics(files / "metrics.jsonl", done) if first_rank else None)[0]
    taught: dict[str, list[bool]] = defaultdict(list)  # of each task: had its groups something to teach?
    for task, useful in (group for metrics in past for group in metrics.get("groups", ())):
        taught[task].append(useful)
    if first_rank:
        begun = (f"{len(experts)} expert windows, {len(others)} other starts; {config.dreaming.tasks} x "
                 f"{config.dreaming.group} rows an update in {config.minibatches} GSPO steps; "
                 f"{distributed.world_size()} rank(s); packed attention: {attention.PACKED_BY}")
        print(f"resuming after update {done} of {config.updates} ({folder})" if done else begun)
        print(f"{config.updates} updates: {config.updates * config.dreaming.tasks / tasks:.2f} passes over "
              f"{tasks} tasks")
        (files / "config.json").write_text(json.dumps(asdict(config), indent=1))
    if actor is not model:
        actor.sync(distributed.full_tensors(model.model, model.compute))

    needed = config.evaluate_every or config.real_share > 0  # or not: a node may lack Chromium
    with (real_web(config) if needed else contextlib.nullcontext() as web,
          open(files / "metrics.jsonl" if first_rank else os.devnull, "a") as log,
          tqdm(total=config.updates, initial=done, desc="dreaming", unit="update", dynamic_ncols=True,
               disable=not first_rank) as bar):
        for n in range(done, config.updates + 1):
            rng, metrics = random.Random(f"{config.seed} {n}"), {"update": n}

            # ---- 1. the real web, on dev seeds: looked at, never learned from ----
            if config.evaluate_every and (n % config.evaluate_every == 0 or n == config.updates):
                began = time.time()
                metrics |= look(web, actor, config)
                metrics["seconds_real"] = round(time.time() - began, 2)
            if n == config.updates:
                write(log, metrics, bar)
                break

            # ---- 2. dream, or act: the ranks share the rows, then every rank holds them all ----
            def make(k: int) -> dream.Batch:  # k > 0: some losses draw again
                drawn = dream.draw(rng, experts, others, config.dreaming, taught)
                share, seed = config.real_share, (config.seed, n, *([k] if k else []))
                real = [share > 0 and rng.random() < share for _ in drawn]  # dreams alone draw nothing here
                return dream.batch(actor, imagination, judge_model, drawn, config.dreaming, seed, web, real)

            began, sampled = time.time(), lm.tokens_sampled()
            batch = gather(make, config)
            for task, useful in batch.metrics["groups"]:
                taught[task].append(useful)
            metrics |= batch.metrics | {"tokens_sampled": sampled_by_all(sampled),
                                        "seconds_dream": round(time.time() - began, 2)}
            past.append(metrics)
            check_drops(past, config)

            # ---- 3. update, unless no group has anything to teach; all ranks hold the batch, and agree ----
            began = time.time()
            if batch.kept:
                rewards = torch.tensor([trajectory.reward for trajectory in batch.kept])  # (K,)
                advantages = advantages_of(rewards, torch.tensor(batch.groups))  # (K,)
                model.model.train()
                metrics |= update(model, optimizer, batch.kept, advantages, config, rng, rule)
                model.model.eval()
                if actor is not model:
                    actor.sync(distributed.full_tensors(model.model, model.compute))
            metrics["seconds_update"] = round(time.time() - began, 2)

            # ---- 4. log, keep ----
            write(log, metrics, bar)
            checkpoints.settle()
            if (n + 1) % config.checkpoint_every == 0 or n + 1 == config.updates:
                if first_rank:
                    dream.dump(files / "dreams.txt", batch.trajectories)
                checkpoints.save(n + 1, asdict(config))
    checkpoints.settle(wait=True)
    lm.save(model, out)
    lm.write_report(out, policy.drawn(config))
    if first_rank:
        plot(files / "metrics.jsonl", files / "curve.png")
        print(f"the agent: {out}   the curve: {files / 'curve.png'}   some dreams: {files / 'dreams.txt'}")


def count_updates(config: Config, tasks: int) -> int:
    """config.updates, or as many as config.epochs passes over so many tasks take.

    >>> count_updates(Config(updates=7), 5017), count_updates(Config(epochs=10), 5017)
    (7, 12543)
    """
    return math.ceil(config.epochs * tasks / config.dreaming.tasks) or config.updates


def starts(config: Config) -> tuple[list[dream.Expert], list[data.Start]]:
    """Where dreams may begin, or real attempts: the windows of the experts; and, where not every group has an
    expert, other recorded pages. Raises ValueError when there is neither, and for a recording that must not
    be learned from, or cannot be done on the config's pages."""
    recorded = data.read_trajectories(config.trajectories)
    check_recorded(recorded, config)
    shown = policy.demonstrations(recorded, config.demonstrations, config.demonstrations_seed)
    others = []
    if config.dreaming.demonstrated < 1:
        failures = [t for t in recorded if t.reward < 1]
        others = dream.first_pages(recorded) + dream.later_pages(failures, config.seed)
    experts = dream.experts(shown, config.dreaming.horizon, config.seed)
    if not recorded:
        raise ValueError(f"{config.trajectories} holds no trajectory; give other --trajectories")
    if not experts and not others:
        raise ValueError(f"{config.trajectories} holds no success: nothing can be an expert; give other "
                         "--trajectories, or --dreaming.demonstrated 0")
    return experts, others


def check_recorded(recorded: Sequence[data.Trajectory], config: Config) -> None:
    """Raises ValueError, where groups are done on real pages, for a task that the browser does not know: a
    page is reset by its task and seed alone."""
    knows = Browser.knows if not config.on.benchmark else real_web(config).tasks().__contains__
    for t in recorded:
        if config.on.benchmark not in ("", "miniwob") and benchmarks.side(t.task) != benchmarks.TRAINING:
            raise ValueError(f"{t.source}: {t.task!r} is held out (benchmarks.side): what is evaluated must "
                             "not be learned from; give other --trajectories (tiny/explore.py records the "
                             "training side)")
        if config.world != "dream" and not knows(t.task):
            raise ValueError(
                f"{t.source}: --world {config.world} begins each trajectory on a real page, and "
                f"{config.on.benchmark or 'browser.py'} cannot reset {t.task!r}. Give --trajectories of its "
                "tasks (tiny/explore.py records them), the --benchmark that they are of, or --world dream")


def fitting(model: lm.LM, experts: Sequence[dream.Expert], others: Sequence[data.Start],
            config: Config) -> tuple[list[dream.Expert], list[data.Start]]:
    """Those of starts() that model.context holds. Rank 0 says how many were dropped.

    An expert's steps are learned from as they are, but for the refused: one over the context would be a
    microbatch that no GPU holds, and again after each resume. A start needs room for its prompt and for the
    longest answer.

    A prompt is tokenised only when its page, goal and past have more than 2 bytes a token of that room. Pages
    have some 3 bytes a token, so what is not tokenised should fit; to tokenise every page of NNetNav would
    take minutes. Raises ValueError when nothing is left.
    """
    room = model.context - config.dreaming.max_new_tokens

    def size(start: data.Start, page: str, previous: Sequence[str]) -> int:  # bytes, of all that varies
        return len("".join((page, start.goal, *previous)).encode())

    def starts_here(start: data.Start) -> bool:
        if size(start, start.page, start.previous) <= 2 * room:
            return True
        return len(policy.turn_prompt(model, start.goal, start.page, start.previous, start.system)) <= room

    def step_fits(start: data.Start, step: data.Step) -> bool:
        if size(start, step.page, step.previous) <= 2 * room:
            return True
        prompt, completion = policy.step_pair(model, start.goal, step, start.system)
        return len(prompt) + len(completion) <= model.context

    kept = [expert for expert in experts if starts_here(expert.start)
            and all(step.error or step_fits(expert.start, step) for step in expert.steps)]
    kept_others = [start for start in others if starts_here(start)]
    for name, all_of_them, left in (("expert windows", experts, kept), ("other starts", others, kept_others)):
        if len(left) < len(all_of_them) and distributed.rank() == 0:
            print(f"{len(all_of_them) - len(left)} of {len(all_of_them)} {name} dropped: a step over "
                  f"--context {model.context} tokens")
    if not kept and not kept_others:
        raise ValueError(f"no expert window and no start of {config.trajectories} fits --context "
                         f"{model.context} tokens; give a larger one")
    return kept, kept_others


def models(config: Config, files: Path) -> tuple[lm.LM, object, world_model.WorldModel | None, object]:
    """(what is trained, what acts, the world model, the judge); the last two are None where nothing is
    dreamed.

    In one process without vLLM the model that is trained also acts. Otherwise a replica or an engine acts on
    each rank, and takes over the weights after every update.
    """
    compute, dreaming = lm.matrix_type(config.compute), config.dreaming
    sharded, dreamed = distributed.world_size() > 1 or config.sampler == "vllm", config.real_share < 1
    check_demonstrations(config)
    if config.offload and not sharded:
        raise ValueError(lm.NO_OFFLOAD)
    if sharded:
        model = lm.load_sharded(config.policy, "", config.context, compute, config.offload)
    else:
        model = lm.load(config.policy, "", config.context, compute)
    if config.sampler == "vllm":
        from node import engine  # wing: who samples on GPUs

        ask = {"world_model": (config.world_model, config.world_model_urls, config.world_model_server,
                               config.world_model_context)}
        if dreaming.judge == "policy":
            ask["judge"] = config.policy, config.judge_urls, config.judge_server, config.judge_context
        started = engine.start(ask if dreamed else {}, files)  # first: servers measure what is free
        answers, frozen = started.get("world_model"), started.get("judge")
        actor = engine.Engine(config.policy, config.context, compute, config.policy_engine)
    else:
        actor = lm.load(config.policy, "", config.context, compute) if sharded else model
        answers = frozen = None
        if dreamed:
            answers = lm.load(config.world_model, "", config.world_model_context, compute)
        if dreamed and dreaming.judge == "policy":
            frozen = lm.load(config.policy, "", config.judge_context, compute)
    if not dreamed:
        return model, actor, None, None
    imagination = world_model.WorldModel(answers, dreaming.world_model_tokens,
                                         dreaming.world_model_temperature)
    judge_model = {"policy": frozen, "current": actor, "world_model": answers}[dreaming.judge]
    return model, actor, imagination, judge_model


def check_demonstrations(config: Config) -> None:
    """Raises ValueError where agent, world model and this run are of different demonstrations. (The judge is
    one of the two models.)"""
    dreamed = {"world model": config.world_model} if config.real_share < 1 else {}
    policy.check_drawn({"agent": config.policy} | dreamed, config)


def made_by(folder: str, program: str, config: Config) -> str:
    """The command that makes a missing model: of the recipe that its folder belongs to. "" for the published
    agent, which comes from the hub.

    >>> made_by("runs/paper/world_model", "world_model.py", Config())
    'torchrun --nproc_per_node 8 world_model.py'
    """
    if "single" in Path(folder).parts:
        return f"python {program} single"
    if "tiny" in Path(folder).parts or config.sampler == "transformers":
        return f"python {program} tiny"
    return "" if folder == Config.policy else f"torchrun --nproc_per_node 8 {program}"


def real_web(config: Config):
    """The world of real pages, to be entered."""
    return benchmarks.world(config.on) if config.on.benchmark else Browser()


def look(web, actor, config: Config) -> dict:
    """{"real_success"} on real pages, on dev seeds (of a benchmark: on so many of its held-out tasks as there
    are seeds), and "looked_at", these in words; the ranks share the trajectories. Where pages failed,
    "real_failed" says how many: they are in no success, and where all failed there is none."""
    seeds, words = data.seeds_to_look_at(config.evaluate_seeds), "dev seeds"
    real = evaluate.real_starts(TASKS, seeds)
    if config.on.benchmark not in ("", "miniwob"):
        held_out = benchmarks.of_side(list(web.tasks()), benchmarks.HELD_OUT)
        real, words = evaluate.real_starts(benchmarks.chosen(held_out, (), len(seeds)), [0]), "held-out tasks"
    played = evaluate.play(web, actor, distributed.spread(real), config.evaluate_horizon,
                           config.dreaming.max_new_tokens, name="real pages")
    result = evaluate.success(distributed.collect(played))
    found = {"real_success": result["success"], "looked_at": words} if result["n"] else {}
    return found | ({"real_failed": result["failed"]} if result["failed"] else {})


# ---- what is written ---------------------------------------------------------------------------------------


def cut_metrics(file: Path, done: int) -> list[dict]:
    """Drop the lines of updates that will be computed again, and a last line that a kill cut in half. Returns
    the rest."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_text().splitlines():
        try:
            metrics = json.loads(line)
        except json.JSONDecodeError:
            continue
        if metrics["update"] < done:  # update number `done` is the next to be computed
            rows.append(metrics)
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(metrics) + "\n" for metrics in rows))
    os.replace(temporary, file)
    return rows


def write(log, metrics: dict, bar: tqdm) -> None:
    """A line of metrics.jsonl, and the progress bar."""
    log.write(json.dumps(metrics) + "\n")
    log.flush()
    names = ["dream_success", "real_train_success", "real_success"]
    names += ["idle"] * (distributed.world_size() > 1)
    shown = {name: f"{metrics[name]:.2f}" for name in names if name in metrics}
    bar.set_postfix(shown, refresh=False)
    if "kept" in metrics:
        worlds = {"dreams": "dream_success", "real pages": "real_train_success"}
        succeeded = "  ".join(f"{world} {metrics[name]:.2f}" for world, name in worlds.items()
                              if name in metrics)
        bar.write(f"update {metrics['update']:4d}  {succeeded}  learned from "
                  f"{metrics['kept']:2d}  dropped {metrics['dropped_dreams']:2d}  clipped "
                  f"{metrics.get('clip_frac', 0):.2f}")
    if "real_success" in metrics:
        bar.write(f"update {metrics['update']:4d}  real success on {metrics.get('looked_at', 'dev seeds')} "
                  f"{metrics['real_success']:.3f}")
    if "real_failed" in metrics:
        bar.write(f"update {metrics['update']:4d}  {metrics['real_failed']} real pages failed twice, and do "
                  "not count")
    bar.update(metrics["update"] + 1 - bar.n if "kept" in metrics else 0)


def plot(metrics: Path, file: Path) -> None:
    """Real and dream success over the updates, side by side: a dream that rises alone is a judge being
    fooled. Where the agent learned on real pages, success there too, and how many steps that took."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    real = [(row["update"], row["real_success"]) for row in rows if "real_success" in row]
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, color, label in (("dream_success", "C0", "in dreams, judged by the agent (sampled)"),
                               ("real_train_success", "C2", "on real pages, training seeds (sampled)")):
        done = [(row["update"], row[name]) for row in rows if name in row]
        last = [[value for _, value in done[max(0, k - 4) : k + 1]] for k in range(len(done))]  # of five
        if done:
            axes.plot([n for n, _ in done], [value for _, value in done], color=color, alpha=0.25)
            axes.plot([n for n, _ in done], [sum(values) / len(values) for values in last], color=color,
                      label=label)
    if real:  # --evaluate-every 0 never looks
        axes.plot([n for n, _ in real], [value for _, value in real], "o-", color="C3",
                  label="on real pages, dev seeds (greedy)")
    steps = sum(row.get("real_steps", 0) for row in rows)
    axes.set(xlabel="update" + f" ({steps:,} real steps in all)" * bool(steps), ylabel="success", ylim=(0, 1))
    if axes.lines:
        axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main():
    from node import preflight  # wing: a look before the work
    from tiny import lessons  # wing: the laptop's settings

    config = lm.chosen({"tiny": ("the laptop: MiniWoB++ pages, two CPU cores", lessons.TRAIN),
                        "single": ("one GPU: a policy of 1B, a world model of 3B", SINGLE),
                        "paper": ("8 x H100: the paper's recipe", Config())})
    lm.needs_gpu(config.policy, (Config.policy, SINGLE.policy), "python train.py tiny")
    lm.command(lambda: train(config), config.sampler == "vllm",
               lambda: preflight.passes(preflight.dreaming, config))


if __name__ == "__main__":
    main()
