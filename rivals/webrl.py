"""WebRL: phases of tries, a reward model, a critic, a replay buffer, and new tasks from failed ones (Qi et
al. 2024, arXiv 2411.02337).

    for each phase:
        1. act: a try at each goal; the outcome is the reward model's YES or NO (sft.py reward_model)
        2. replay: turns of earlier successes that are neither too familiar nor too strange, at most twice the
           new ones
        3. the critic V(s) learns the outcome; advantages (webrl_loss.py, Eq. 8, 9)
        4. the goals of the next phase come from those that failed (curriculum.py); keep those whose first
           page the critic gives .05 to .75, and which are feasible
        5. a pass over new and replayed turns with the actor's loss (webrl_loss.py, Eq. 6)

    python -m rivals.webrl laptop                         # on real pages, as published; models of `make`
    python -m rivals.webrl laptop --world dream --out runs/laptop/webrl-dream      # in dreams: ours alone
    ... --loss sft | --replay 0 | --breed 0               # without KL term, buffer, curriculum
    torchrun --nproc_per_node 8 -m rivals.webrl paper     # Llama-3.1-8B on WebArena; never run here

Killed at any moment, the same command goes on from the last checkpoint. OUT.run/phase-N.json holds what later
phases need of phase N: its successes, and the goals made in it.

Where we differ from the paper, and why (more in webrl_loss.py and curriculum.py)
- The reward model is the judge's, asked and trained as it is (judge.py): it reads the page before the last
  action, too, and what it cannot read is neither YES nor NO: that try is dropped. The published one
  (THUDM/webrl-orm-llama-3.1-8b) has another prompt.
- beta: the paper gives no value. 1 is the released code's; in Fig. 7 a beta >= 1 does well with the buffer,
  and .01 does badly.
- The demonstrations are in the buffer from the start: the other agents here learn from them, too.
- Goals are made before the update of their phase, so that the critic scores them with the trunk that it was
  fitted on. The paper makes them after it.
- One optimizer over all phases; theirs is made anew.
- "No KL term" is the paper's: cloning of successes, buffer kept (sec. 3.7). Its "no curriculum" is DigiRL.
  Ours draws known goals in every phase, and changes nothing else.
- Released code: a goal passes where either of two heads says .05 to .75; V(s') learns the outcome as well.
- Released code (scripts/process_data in it) shows every try to the reward model, one that ran out of steps
  too. Here such a try is a failure, unread. Of a goal's successes it replays the first that it meets; here
  the last one stays.
- Its critic can go on from the last phase's (critic_resume_path). Ours is fitted anew in every phase, on half
  of 64 tries, and knows little: see webrl_loss.py.

Costs in metrics.jsonl and OUT.run/costs.json: real steps; labels (real rewards of this run that something
learned from); tokens that all models sampled; seconds. With --reward page the page pays on real pages, and
that is a label; otherwise it only tells how right the reward model is. Pages that are reset to find goals are
no steps: nobody acts there.
"""

import contextlib
import functools
import json
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import data
import distributed
import dream
import finetune
import gspo
import judge
import lm
import measure
import policy
import recipe
import remote
import train
import update
from data import Start, Trajectory
from node import engine
from policy import TokenTrajectory
from rivals import curriculum, webrl_loss
from rivals.webrl_loss import Critic
from worlds import benchmarks

LEARNABLE = (0.05, 0.75)  # what the critic may say of a new goal's first page (sec. 2.2)

# ---- settings ----------------------------------------------------------------------------------------------

RULES = ("published", "released", "sft")


@dataclass(frozen=True)
class Config(recipe.Train):
    """WebRL's phases."""

    updates: int = 10
    """Number of phases."""
    reward: str = "model"
    """Who pays on real pages: the reward `model` (--judge-model), or the `page` itself."""
    goals: int = 64
    """Goals of a phase, one try each (paper: 500)."""
    loss: str = "published"
    """The actor's: `published` (Eq. 6), `released` (THUDM/WebRL's code), or `sft` (no KL term: clone the
    successes)."""
    beta: float = 1.0
    """Strength of the KL term (released code: 1; the paper gives no value)."""
    lam: float = 0.5
    """Weight of the next step's advantage; the outcome's has the rest (paper: 0.5)."""
    batch: int = 32
    """Turns of an optimizer step (paper: 128)."""
    replay: float = 2.0
    """Most replayed turns for each new one (paper: 2). 0: no buffer."""
    breed: int = 2
    """New goals for each failed one, of which the critic keeps some. 0: no curriculum, goals are drawn from
    the known ones in every phase."""
    teacher_url: str = ""
    """URL (.../v1) of the language model that writes goals on sites, and says which can be done."""
    teacher_model: str = ""
    """The name that this server gives it."""
    held_out: str = ""
    """With --benchmark webarena: a list whose tasks are no goals (webarena_lite)."""

    def __post_init__(self):
        super().__post_init__()
        if self.loss not in RULES:
            raise ValueError(f"loss is {', '.join(RULES)}, not {self.loss!r}")
        if self.reward not in ("model", "page") or (self.reward == "page" and self.teacher_url):
            raise ValueError(f"reward is model or page, not {self.reward!r}; and no page knows of goals that "
                             "a teacher made: with --teacher-url it is model")
        if not self.judge_model and (self.reward == "model" or self.world != "real"):
            raise ValueError("WebRL has a reward model: give its folder as --judge-model")
        if bool(self.teacher_url) != bool(self.teacher_model):
            raise ValueError("a teacher needs both: give --teacher-url http://host:port/v1 and "
                             "--teacher-model NAME")
        if self.on.benchmark == "miniwob":
            raise ValueError("--benchmark miniwob: these are the pages of no --benchmark; leave it out")
        if self.on.benchmark and self.world != "real":
            raise ValueError(f"no page of {self.on.benchmark} is recorded to dream from: give --world real")
        if self.on.benchmark and self.breed and not self.teacher_url:
            raise ValueError(f"other seeds are other goals on MiniWoB++ alone: on {self.on.benchmark} give "
                             "--teacher-url and --teacher-model, or --breed 0")
        if self.goals < 2 or self.batch < 1 or not 0 < self.beta or not 0 <= self.lam <= 1:
            raise ValueError(f"goals {self.goals}, batch {self.batch}, beta {self.beta:g}, lam {self.lam:g}: "
                             "give at least 2 goals, a batch of 1, a beta above 0, a lam from 0 to 1")
        for given, default in ((self, recipe.Train()), (self.dreaming, dream.Config())):
            for name in ("epochs", "minibatches", "eps_low", "eps_high", "first_pages", "tasks", "group",
                         "expert_fraction", "judge"):
                if getattr(given, name, None) != getattr(default, name, None):
                    raise ValueError(f"{name}: WebRL has no use for it; leave it out")


_OWN = ("epochs", "minibatches", "eps_low", "eps_high", "first_pages")  # of GSPO's loop
LAPTOP = Config(
    **{name: value for name, value in vars(recipe.LAPTOP).items() if name not in _OWN} | dict(
        out="runs/laptop/webrl", world="real", updates=10, evaluate_every=5, checkpoint_every=1,
        dreaming=replace(recipe.LAPTOP.dreaming, tasks=4, expert_fraction=0.5)))  # as Config has them

# Never run: no such node and no such sites were here. Actor: a published SFT agent for WebArena. Goals begin
# on the tasks of WebArena that WebArena-Lite leaves. Table 4's rates and batch; phases and horizon assumed.
PAPER = Config(
    policy="stanfordnlp/llama8b-nnetnav-wa", judge_model="runs/paper/reward_model", out="runs/paper/webrl",
    world="real", on=data.Options("webarena"), held_out="webarena_lite", updates=8, goals=500,
    batch=128, lr=1e-6, evaluate_every=0, checkpoint_every=1, drop_limit=0.5,
    teacher_url="http://127.0.0.1:8000/v1", teacher_model="teacher",
    judge_context=24576, judge_server=recipe.ServerConfig(kv_cache_gb=2.0),
    dreaming=dream.Config(horizon=30, temperature=1.0, max_new_tokens=1024, judge_tokens=0))
MAY_CHANGE = (*recipe.MAY_CHANGE, "teacher_url")

# ---- what the models say of turns --------------------------------------------------------------------------


def read_states(model: lm.LM, prompts: Sequence[list[int]], tokens: int) -> Tensor:
    """What the trunk makes of each prompt (S, W), on every rank; the ranks share the reading."""
    batches = lm.microbatches([len(prompt) for prompt in prompts], tokens)
    costs = [sum(len(prompts[k]) for k in batch) for batch in batches]
    read = {}
    for index, weight in distributed.assign(costs, distributed.world_size())[distributed.rank()]:
        states = lm.last_hidden(model, [prompts[k] for k in batches[index]]).cpu()
        if weight:
            read |= dict(zip(batches[index], states))
    whole = {k: state for part in distributed.gather(read) for k, state in part.items()}
    return torch.stack([whole[k] for k in range(len(prompts))])


def perplexities(model: lm.LM, pairs: Sequence[lm.Pair], tokens: int) -> list[float]:
    """Of each completion at temperature 1, on every rank; the ranks share the scoring."""
    if not pairs:
        return []
    turns = update.Minibatch([(k, pair, ()) for k, pair in enumerate(pairs)], tokens)
    logp = turns.score(model, 1.0)
    mean, _ = gspo.mean_log_ratio(logp, torch.zeros_like(logp), turns.trajectory, len(pairs))
    return (-mean).exp().tolist()


# ---- a phase -----------------------------------------------------------------------------------------------


def act(models: dream.Models, starts: Sequence[Start], config: Config, seeds: Sequence[int],
        web, real: Sequence[bool]) -> list[tuple[TokenTrajectory, float]]:
    """(trajectory, what the page paid; 0 for a dream) of a try at each goal, on every rank; the ranks share
    the acting. Where the reward model pays, its verdict is the reward; what it cannot read is dropped."""
    rows, mine = [(start, None) for start in distributed.shard_rows(starts)], distributed.shard_rows(real)
    played = dream.trajectories(models, rows, config.dreaming, distributed.shard_rows(seeds), web, mine)
    paid = [t.reward if t.real else 0.0 for t in played]
    if config.reward == "model":
        ended = [t for t in played if t.real and t.terminated and not t.dropped]
        said = models.judge.verdicts([(t.start.goal, *judge.ending(t)) for t in ended])
        for trajectory, verdict in zip(ended, said):
            trajectory.verdict, trajectory.reward = verdict, float(verdict.success)
            trajectory.dropped = verdict.unknown and f"judge: {verdict.unknown}"
    return distributed.collect(list(zip(played, paid)))


Memory = dict[str, TokenTrajectory]  # the buffer: the last success at each goal (released code: the first)


def remember(memory: Memory, trajectories: Sequence[TokenTrajectory]) -> None:
    for t in trajectories:
        key = f"{t.start.task} {t.start.seed} {t.start.goal}"
        memory.pop(key, None)  # the newest stands last, so that the order is that of the phases
        memory[key] = TokenTrajectory(t.start, pairs=t.pairs, logps=[[] for _ in t.pairs], reward=1.0)


def recall(model: lm.LM, memory: Memory, new_turns: int, config: Config,
           rng: random.Random) -> list[tuple[TokenTrajectory, set[int]]]:
    """The buffer's trajectories of which turns are replayed, and which turns."""
    turns = [(t, k) for t in memory.values() for k in range(len(t.pairs))] if config.replay else []
    scores = perplexities(model, [t.pairs[k] for t, k in turns], config.tokens)
    chosen: dict[int, tuple[TokenTrajectory, set[int]]] = {}
    for index in webrl_loss.replayed(scores, int(config.replay * new_turns), rng):
        t, k = turns[index]
        chosen.setdefault(id(t), (t, set()))[1].add(k)
    return list(chosen.values())


def estimate(model: lm.LM, trajectories: Sequence[TokenTrajectory],
             config: Config) -> tuple[Tensor, Critic, dict]:
    """(what the actor's rule is told of each turn (S,), the critic of all turns, metrics)."""
    trajectory = torch.tensor([b for b, t in enumerate(trajectories) for _ in t.pairs])  # (S,)
    outcomes = torch.tensor([t.reward for t in trajectories])  # (B,)
    states = read_states(model, [prompt for t in trajectories for prompt, _ in t.pairs], config.tokens)
    # The ranks' sums may differ in the last bit, and with them what is planned: all take rank 0's.
    values, critic = distributed.gather((webrl_loss.unseen_values(states, trajectory, outcomes),
                                         webrl_loss.fit(states, outcomes[trajectory])))[0]
    told = {"published": lambda: webrl_loss.advantages(values, trajectory, outcomes, config.lam),
            "released": lambda: webrl_loss.good_steps(values, trajectory, outcomes),
            "sft": lambda: outcomes[trajectory]}[config.loss]()
    loss = F.binary_cross_entropy(values.clamp(1e-6, 1 - 1e-6), outcomes[trajectory])
    return told, critic, {"critic_loss": round(float(loss), 4), "value": round(float(values.mean()), 4)}


def breed(model: lm.LM, web, teacher, critic: Critic, failed: Sequence[Start], known: Sequence[Start],
          config: Config, seed: tuple) -> tuple[list[Start], dict]:
    """(the goals of the next phase, metrics): new ones for those that failed, learnable by the critic,
    feasible; where these are too few, goals that are known."""
    rng, goals, bred, learnable = random.Random(repr(seed)), [], [], []
    if config.breed and failed:
        if teacher is not None:
            bred = curriculum.bred_by_teacher(teacher, failed, config.breed * config.goals, lm.mix(*seed))
        elif config.real_share:
            bred = curriculum.other_seeds(web, failed, config.breed, rng)
        else:
            bred = curriculum.other_recordings(known, failed, config.breed, rng)
        room = model.context - config.dreaming.max_new_tokens
        prompts = [policy.turn_prompt(model, start.goal, start.page, start.previous, start.system)
                   for start in bred]
        read = [k for k, prompt in enumerate(prompts) if len(prompt) <= room]
        if read:
            values = critic.values(read_states(model, [prompts[k] for k in read], config.tokens)).tolist()
            values = distributed.gather(values)[0]
            learnable = [bred[k] for k, value in zip(read, values) if LEARNABLE[0] <= value <= LEARNABLE[1]]
        goals = rng.sample(learnable, min(config.goals, len(learnable)))
        if teacher is not None:
            goals = curriculum.feasible_by_teacher(teacher, goals)
    filled = draw(rng, known, config.goals - len(goals))
    return goals + filled, {"bred": len(bred), "learnable": len(learnable), "kept_goals": len(goals)}


def draw(rng: random.Random, known: Sequence[Start], count: int) -> list[Start]:
    """`count` known goals, task by task."""
    return [start for start, _ in dream.draw(rng, [(start, None) for start in known], count)]


def learn(model: lm.LM, optimizer: torch.optim.Optimizer, new: Sequence[TokenTrajectory],
          old: Sequence[tuple[TokenTrajectory, set[int]]], told: Tensor, config: Config,
          rng: random.Random) -> dict:
    """A pass over all new turns and the replayed ones: update.update, a turn in the place of a trajectory."""
    turns = [(t, k) for t in [*new, *(t for t, _ in old)] for k in range(len(t.pairs))]
    replayed_turns = {(id(t), k) for t, chosen in old for k in chosen}
    fresh = sum(len(t.pairs) for t in new)
    wanted = [s for s, (t, k) in enumerate(turns) if s < fresh or (id(t), k) in replayed_turns]
    units = [TokenTrajectory(t.start, pairs=[t.pairs[k]], logps=[t.logps[k]])
             for t, k in (turns[s] for s in wanted)]
    rule = {"published": functools.partial(webrl_loss.actor_rule, beta=config.beta),
            "released": webrl_loss.released_rule, "sft": webrl_loss.sft_rule}[config.loss]
    given = {each.name: getattr(config, each.name) for each in fields(update.Config)}
    steps = update.Config(**given | {"minibatches": max(2, math.ceil(len(units) / config.batch))})
    model.model.train()
    metrics = update.update(model, optimizer, units, told[wanted], steps, config.dreaming.temperature,
                            rng, rule)
    model.model.eval()
    return metrics | {"turns": fresh, "replayed_turns": len(units) - fresh,
                      "steps_taken": update.steps(len(units), steps)}


# ---- the loop ----------------------------------------------------------------------------------------------


def known_goals(config: Config, web, recorded: Sequence[Trajectory]) -> list[Start]:
    """What the first phase draws from: recorded first pages; on another benchmark the tasks of the training
    side (data.side), but for those of config.held_out."""
    if not config.on.benchmark:
        return [recipe.first_page(t) for t in recorded if t.steps and t.steps[0].index == 0]
    out = {task.split(".")[-1] for task in
           benchmarks.world(data.Options(config.held_out)).tasks()} if config.held_out else set()
    return [replace(data.start(name), goal=task.goal) for name, task in web.tasks().items()
            if data.side(name) == data.TRAINING and name.split(".")[-1] not in out]


def learnable(played: Sequence[tuple[TokenTrajectory, float]]) -> list[TokenTrajectory]:
    """The trajectories that something can be learned from."""
    return [t for t, _ in played if t.pairs and not t.dropped]


def measured(played: Sequence[tuple[TokenTrajectory, float]], config: Config, own: set[str]) -> dict:
    """What is logged of a phase; what it cost; and how right the reward model was where a page pays too: for
    goals of its own, and those of a teacher are not (`own`: those that are; empty: all)."""
    trajectories = [t for t, _ in played]
    metrics = measure.of_batch(dream.Batch(trajectories, learnable(played), [],
                                           [(t.start.task, t.reward > 0) for t in trajectories]))
    both = [(t.reward > 0, paid > 0) for t, paid in played
            if t.real and not t.dropped and (not own or t.start.goal in own)]
    metrics["labels"] = sum(t.real for t in trajectories) if config.reward == "page" else 0
    if both and config.reward == "model":
        metrics["reward_model"] = measure.precision_recall(*zip(*both))
    return {name: value for name, value in metrics.items() if name not in ("groups", "dropped_groups")}


def write_phase(file: Path, goals: Sequence[Start], successes: Sequence[TokenTrajectory]) -> None:
    """What later phases need of this one, and a resumed run."""
    content = {"goals": [asdict(goal) for goal in goals],
               "successes": [[asdict(t.start), t.pairs] for t in successes]}
    temporary = file.with_suffix(".partial")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, file)


def read_phase(file: Path) -> tuple[list[Start], list[TokenTrajectory]]:
    def start(row: dict) -> Start:
        return Start(**row | {"prefix": tuple(row["prefix"]), "previous": tuple(row["previous"])})

    content = json.loads(file.read_text())
    return ([start(row) for row in content["goals"]],
            [TokenTrajectory(start(row), pairs=[tuple(pair) for pair in pairs], reward=1.0)
             for row, pairs in content["successes"]])


def demonstrated(model: lm.LM, recorded: Sequence[Trajectory], config: Config) -> list[TokenTrajectory]:
    """The demonstrations in tokens, but for steps that were refused or do not fit."""
    shown = []
    for t in finetune.successes(recorded, config.demonstrations):
        pairs = [policy.step_pair(model, t.goal, step, t.system) for step in t.steps if not step.error]
        pairs = [pair for pair in pairs if sum(map(len, pair)) <= model.context]
        shown += [TokenTrajectory(recipe.first_page(t), pairs=pairs, reward=1.0)] * bool(pairs)
    return shown


@dataclass
class Models:
    """All that a phase asks: what is trained, who dreams (the reward model judges), and the teacher, None
    where nobody needs it."""

    trained: lm.LM
    parts: dream.Models
    teacher: object

    def sync(self) -> None:
        """What acts takes over what was learned."""
        if self.parts.agent is not self.trained:
            self.parts.agent.sync(distributed.full_tensors(self.trained.model, self.trained.compute))


def models(config: Config, files: Path) -> Models:
    """Load or start them. The reward model first: servers measure what is free before the policy's engine."""
    reward = None
    if config.world == "real" and config.reward == "model":  # train.py loads a judge for dreams alone
        if config.sampler == "vllm":
            reward = engine.start({"judge": (config.judge_model, config.judge_urls, config.judge_server,
                                             config.judge_context)}, files)["judge"]
        else:
            compute = lm.matrix_type(config.compute)
            reward = train.frozen_model(config.judge_model, config.judge_context, compute)
    given = recipe.Train(**{each.name: getattr(config, each.name) for each in fields(recipe.Train)})
    trained, parts = train.load_models(given, files)
    if reward is not None:
        parts = replace(parts, judge=judge.Judge(reward, config.dreaming.judge_tokens))
    teacher = remote.Chat(config.teacher_url, config.teacher_model) if config.teacher_url else None
    return Models(trained, parts, teacher)


def tries(asked: Models, goals: Sequence[Start], known: Sequence[Start], web, config: Config, n: int,
          rng: random.Random) -> tuple[list[tuple[TokenTrajectory, float]], dict]:
    """(tries at the goals of phase n as `act` gives them, metrics): step 1 of a phase."""
    began, sampled = time.time(), lm.tokens_sampled()
    real = [config.real_share > 0 and rng.random() < config.real_share for _ in goals]
    seeds = [lm.mix(config.seed, n, k) for k in range(len(goals))]
    played = act(asked.parts, goals, config, seeds, web, real)
    own = {start.goal for start in known} if asked.teacher is not None else set()
    metrics = measured(played, config, own)
    return played, metrics | {"tokens_sampled": measure.sampled_by_all(sampled),
                              "seconds_dream": round(time.time() - began, 2)}


def improve(asked: Models, optimizer: torch.optim.Optimizer, new: Sequence[TokenTrajectory], memory: Memory,
            known: Sequence[Start], web, config: Config, n: int, rng: random.Random
            ) -> tuple[list[Start], dict]:
    """(the goals of the next phase, metrics): steps 2 to 5 of phase n. All ranks hold the same turns."""
    began, goals, metrics, model = time.time(), [], {}, asked.trained
    if new:
        old = recall(model, memory, sum(len(t.pairs) for t in new), config, rng)  # 2. replay
        told, critic, metrics = estimate(model, [*new, *(t for t, _ in old)], config)  # 3. the critic
        failed = [replace(t.start, url=t.steps[0].url, page=t.steps[0].page)
                  for t in new if t.reward < 1 and t.steps]
        goals, bred = breed(model, web, asked.teacher, critic, failed, known, config,
                            (config.seed, n))  # 4. new goals
        metrics |= bred | learn(model, optimizer, new, old, told, config, rng)  # 5. learn
        asked.sync()
    remember(memory, [t for t in new if t.reward == 1])
    return goals, metrics | {"buffer": len(memory), "seconds_update": round(time.time() - began, 2)}


def left_over(config: Config, files: Path, trained: lm.LM, optimizer: torch.optim.Optimizer, memory: Memory
              ) -> tuple[int, list[dict], list[Start]]:
    """(phases done, their metrics, goals of the next) of a killed run, whose successes go into the
    buffer."""
    first_rank = distributed.rank() == 0
    done = distributed.load_checkpoint(files / "checkpoint", trained.model, optimizer, asdict(config),
                                       MAY_CHANGE)
    logged = distributed.gather(measure.cut_metrics(files / "metrics.jsonl", done) if first_rank else None)[0]
    goals: list[Start] = []
    for n in range(done):
        goals, successes = read_phase(files / f"phase-{n}.json")
        remember(memory, successes)
    return done, logged, goals


def keep(config: Config, files: Path, trained: lm.LM, optimizer: torch.optim.Optimizer, n: int,
         goals: Sequence[Start], played: Sequence[tuple[TokenTrajectory, float]]) -> None:
    """What later phases and a resumed run need of phase n."""
    if distributed.rank() == 0:
        write_phase(files / f"phase-{n}.json", goals, [t for t in learnable(played) if t.reward == 1])
    if (n + 1) % config.checkpoint_every == 0 or n + 1 == config.updates:
        distributed.save_checkpoint(files / "checkpoint", n + 1, trained.model, optimizer, asdict(config),
                                    config.keep_checkpoints)


def train_phases(config: Config) -> None:
    """The run from its first phase, or from its last checkpoint, to its last. All ranks call it."""
    config, out = recipe.with_type(config), Path(config.out)
    files, first_rank = out.parent / f"{out.name}.run", distributed.rank() == 0
    files.mkdir(parents=True, exist_ok=True)
    recorded = [] if config.on.benchmark else data.read_trajectories(config.trajectories)
    recipe.check_recorded(recorded, config, benchmarks.knows(config.on))
    asked = models(config, files)
    lm.train_last(asked.trained, config.trained_layers)
    optimizer = torch.optim.AdamW([p for p in asked.trained.model.parameters() if p.requires_grad],
                                  lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    memory: Memory = {}
    remember(memory, demonstrated(asked.trained, recorded, config))
    done, logged, goals = left_over(config, files, asked.trained, optimizer, memory)
    if first_rank:
        (files / "config.json").write_text(json.dumps(asdict(config), indent=1))
    asked.sync()
    needed = config.evaluate_every or config.real_share > 0
    with (benchmarks.world(config.on, remote.grader(config.on)) if needed
          else contextlib.nullcontext() as pages,
          open(files / "metrics.jsonl" if first_rank else os.devnull, "a") as log,
          tqdm(total=config.updates, initial=done, desc="webrl", unit="phase", dynamic_ncols=True,
               disable=not first_rank) as bar):
        web = curriculum.OtherGoals(pages) if asked.teacher is not None else pages
        found = [(start, None) for start in known_goals(config, pages, recorded)]
        known = [start for start, _ in recipe.fitting(asked.trained, found, config)]
        looked_at = benchmarks.starts(config.on, pages, config.evaluate_seeds,
                                      sorted({start.task for start in known}))
        for n in range(done, config.updates + 1):
            rng, metrics, began = random.Random(f"{config.seed} {n}"), {"update": n}, time.time()
            if config.evaluate_every and (n % config.evaluate_every == 0 or n == config.updates):
                metrics |= measure.look(pages, asked.parts.agent, *looked_at, config.evaluate_horizon,
                                        config.dreaming.max_new_tokens)
                metrics["seconds_real"] = round(time.time() - began, 2)
            if n == config.updates:
                measure.write(log, metrics, bar)
                break
            goals = goals or draw(rng, known, config.goals)
            played, of_tries = tries(asked, goals, known, web, config, n, rng)
            metrics |= of_tries
            logged.append(metrics)
            recipe.check_drops(logged, config)
            goals, learned = improve(asked, optimizer, learnable(played), memory, known, web, config, n, rng)
            metrics |= learned
            measure.write(log, metrics, bar)
            keep(config, files, asked.trained, optimizer, n, goals, played)
    finish(config, asked, files, logged)


def finish(config: Config, asked: Models, files: Path, logged: Sequence[dict]) -> None:
    """Write what a whole run leaves: the agent, its curve, and what it cost. Looks at dev seeds are not
    counted: nothing learned from them."""
    lm.save(asked.trained, config.out)
    if distributed.rank() == 0:
        costs = {name: round(sum(row.get(name, 0) for row in logged), 1) for name in (
            "real_steps", "labels", "tokens_sampled", "real_trajectories", "dreams", "seconds_dream",
            "seconds_update")}
        (files / "costs.json").write_text(json.dumps(costs, indent=1))
        measure.plot(files / "metrics.jsonl", files / "curve.png")
        print(f"the agent: {config.out}   what it cost: {files / 'costs.json'}")


def main():
    config = recipe.chosen({"laptop": ("two CPU cores: SmolLM2-135M on MiniWoB++ pages", LAPTOP),
                            "paper": ("8 x H100: Llama-3.1-8B on WebArena", PAPER)})
    recipe.needs_gpu(config.policy, (PAPER.policy,), "python -m rivals.webrl laptop")
    recipe.command(lambda: train_phases(config), config.sampler == "vllm")


if __name__ == "__main__":
    main()
