"""Will it fit, and how long: what a recipe takes of a GPU, a host, a disk and a day.

    python -m node.plan                                        # the paper's recipe on 8 x H100-80GB
    python -m node.plan single --card L40S-48GB                # one GPU, and the flags that fit it
    python -m node.plan paper --card H200-141GB --ranks 4
    python -m node.plan webrl                                  # rivals/webrl.py and its reward model

Any laptop can print it, before anything is rented. Where the recipe for one GPU does not fit a card as it is,
the plan is of the first flags of SMALLER that do. A recipe that you changed is planned from Python:
plan.report(plan.Recipe(replace(recipe.SINGLE, context=12288)), "L40S-48GB", 1).

The trainer's memory is simulated (node/simulate.py) and errs to the safe side. The hours are arithmetic
(node/hours.py).

Units: GB is 1e9 bytes; tokens are the model's.
"""

import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import tyro

import data
import dream
import finetune
import recipe
from node import hours, printed
from node.hours import PAGE, TRIES, VERDICT, Row, Sampler, Stage, delta_tokens, pages_of, total
from node.machine import PROCESS
from node.simulate import Trainer, simulate
from node.sizes import GB, Card, Model, read_card, read_model
from worlds.miniwob import TASKS as MINIWOB
from worlds.webarena import WebArena

# GB a GPU (NOTES 9.11, inferred there).
TRAINER_EXTRA = 3.0  # CUDA context, NCCL, fragmentation
TASKS = 5_017  # of nnetnav-live (NOTES 1.5)
DATA = 3.55 + 1.97  # GB on disk: nnetnav-live and nnetnav-wa
RECORDED = 2e-6  # a recorded trajectory of MiniWoB++, packed (the shipped 4,800: .5 MB, some 10 unpacked)
PREPARED = 4  # bytes a token on disk: int32 (node/prepare.py)

# ---- memory of a GPU, phase by phase -----------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """GB of each GPU in a part of the recipe. `tokens` of a microbatch and `context`, the longest sequence,
    are learned from by `trainer`, whose memory is among the rows. `before`: what it does before an update."""

    title: str
    card: Card
    rows: list[Row]
    trainer: Trainer
    tokens: int
    context: int
    before: str = "dreaming"

    @property
    def dreaming(self) -> float:
        return sum(row.dreaming for row in self.rows)

    @property
    def update(self) -> float:
        return sum(row.update for row in self.rows)

    def update_on(self, tokens: int) -> float:
        """The update, if its microbatches have so many tokens."""
        return self.update - self.trainer.peak(self.tokens) + self.trainer.peak(tokens)

    @property
    def longest(self) -> float:
        """The update, while a sequence of the whole context is learned from, alone in its microbatch."""
        return self.update_on(self.context)

    @property
    def free(self) -> float:
        """GB left in the tightest phase, long sequences included; negative when it does not fit."""
        return self.card.memory - max(self.dreaming, self.update, self.longest)

    @property
    def fits(self) -> int:
        """The longest microbatch that has room, in steps of 1,024 tokens up to the context; 0: none."""
        lengths = range(1024, self.context + 1024, 1024)
        return max((T for T in lengths if self.update_on(T) <= self.card.memory), default=0)


@dataclass(frozen=True)
class Change:
    """A way to fit: the GB that it alone would leave free in the tightest phase, and what it costs."""

    what: str
    free: float
    cost: str


@dataclass(frozen=True)
class Plan:
    """All numbers of one part of the recipe. `host` and `disk`: {what: GB}."""

    memory: Memory
    changes: list[Change]
    host: dict[str, float]
    disk: dict[str, float]
    stages: list[Stage]


def trainer_rows(trainer: Trainer, tokens: int, ranks: int, kind: str) -> list[Row]:
    stays, grows = trainer.resident, trainer.peak(tokens) - trainer.resident
    what = f"simulated, {ranks} rank{'s' * (ranks > 1)}, {kind}"
    return [Row("trainer: weights, Adam", stays, stays, what),
            Row(f"trainer: a microbatch of {tokens:,}", 0.0, grows,
                "gathered layers, activations, head, gradients"),
            Row("trainer: CUDA, NCCL, fragments", TRAINER_EXTRA, TRAINER_EXTRA, "allowance")]


def roles(config: recipe.Train, agent: Model, world: Model, ranks: int) -> list[Sampler]:
    """Who acts, who answers for the web, and who judges. A judge without a server is one of the others."""
    d, engine, pages = config.dreaming, config.policy_engine, pages_of(config.trajectories)
    frozen = read_model(config.judge_model) if config.judge_model else agent

    def served(name: str, model: Model, urls: Sequence[str], mean: float, context: int) -> Sampler:
        its = getattr(config, name.replace(" ", "_"))
        tp = model.tensor_parallel(min(ranks, its.tensor_parallel))
        kv = math.inf if urls else its.kv_cache_gb
        return Sampler(name, model, tp, kv, mean, context, its.max_num_seqs)

    acts = Sampler("policy engine", agent, 1, engine.kv_cache_gb, pages.page + pages.answer, config.context,
                   engine.max_num_seqs)
    answers = served("world model server", world, config.answers_elsewhere,
                     pages.world * pages.page + hours.answer_tokens(d, pages), config.world_model_context)
    judges = {"current": acts, "world_model": answers, "policy": served(
        "judge server", frozen, config.judge_urls, pages.judge * pages.page + pages.verdict,
        config.judge_context)}
    return [acts, answers, judges[d.judge]]


def samplers(config: recipe.Train, agent: Model, world: Model, ranks: int,
             roles: Callable = roles) -> list[Sampler]:
    """The policy's engine, and the servers that do not stand elsewhere, each with its own context. Raises
    ValueError when a cache holds no sequence of the whole context: vLLM would not start."""
    dreamed = config.real_share < 1
    found = {each.name: each for each in roles(config, agent, world, ranks)[: None if dreamed else 1]}
    for name, sampler in found.items():
        if sampler.kv < (need := sampler.model.kv(sampler.context, sampler.tp)):
            shorter = {"world model server": "--world-model-context", "judge server": "--judge-context"}
            raise ValueError(f"--{name.replace(' ', '-')}.kv-cache-gb {sampler.kv} holds no sequence of "
                             f"{sampler.context:,} tokens ({need:.1f} GB), and vLLM would not start: raise "
                             f"it, or lower {shorter.get(name, '--context')}")
    return [sampler for sampler in found.values() if sampler.kv < math.inf]


def plan_train(config: recipe.Train, card: str = "H100-80GB", ranks: int = 8,
               roles: Callable = roles) -> Plan:
    """The plan of train.py. Raises ValueError for an unknown card or model, the laptop's sampler, and real
    pages. `roles`: who is asked, called as the function of that name."""
    if config.sampler != "vllm":
        raise ValueError("the plan is for GPUs and vLLM (sampler vllm); the laptop's recipe needs neither: "
                         "1 GB of memory, a quarter of an hour")
    if config.real_share > 0:
        raise ValueError(f"--world {config.world}: the plan knows how long dreams take, and of real pages "
                         "nobody has measured it; plan with --world dream")
    gpu, agent, world = read_card(card), read_model(config.policy), read_model(config.world_model)
    _, *servers = samplers(config, agent, world, ranks, roles)  # before the simulation: it may refuse
    simulated = simulate(agent.config, ranks, sorted({config.tokens, config.context}))
    title = f"{agent.name} dreams in {world.name}"

    def memory(config: recipe.Train) -> Memory:
        trainer = replace(simulated, offload=config.offload)
        rows = trainer_rows(trainer, config.tokens, ranks, "float32" + ", in host memory" * config.offload)
        for sampler in samplers(config, agent, world, ranks, roles):
            rows += sampler.rows()
        return Memory(title, gpu, rows, trainer, config.tokens, config.context)

    served, states, kept = 2 * agent.parameters / GB, 12 * agent.parameters / GB, config.keep_checkpoints + 1
    disk = {f"the agent ({agent.name}, bf16)": served, f"{kept} checkpoints (float32, Adam)": kept * states,
            "the trained agent": served}
    speeds = lambda f: [each.speed(gpu, f) for each in roles(config, agent, world, ranks)]
    stages = hours.ranged(lambda f: hours.dream_step(f, config, agent, gpu, ranks, speeds(f)))
    return Plan(memory(config), train_changes(config, memory, agent, world),
                host(ranks + sum(server.tp for server in servers), states, config.offload), disk, stages)


def host(processes: int, states: float, offload: bool = False) -> dict[str, float]:
    """`states`: GB of float32 weights and Adam's two moments."""
    who = f"{processes} process{'es' * (processes > 1)} with CUDA, {PROCESS:.0f} GB each"
    found = {who: PROCESS * processes, "a checkpoint on its way to disk": states}
    return found | ({"offloaded weights, gradients, Adam": states * 4 / 3} if offload else {})


def train_changes(config: recipe.Train, memory: Callable[[recipe.Train], Memory], agent: Model,
                  world: Model) -> list[Change]:
    """In the order in which to try them: what costs least comes first. Each is counted alone."""
    now, changes = memory(config), []

    def change(what: str, cost: str, **new) -> None:
        changes.append(Change(what, memory(replace(config, **new)).free, cost))

    if now.fits and now.fits < config.context:
        flags = f"--context {now.fits}" + f" --tokens {now.fits}" * (now.fits < config.tokens)
        change(flags, "dreams on longer pages are dropped and counted", context=now.fits,
               tokens=min(config.tokens, now.fits))
    if not config.offload:
        needed = f"{16 * agent.parameters / GB:.0f} GB of host memory"
        change("--offload", f"{needed}, and slower updates", offload=True)
    elsewhere = lambda model: f"another machine with {model.served(1) * 1.1:.0f} GB of GPU memory"
    if not config.answers_elsewhere:
        change("--world-model-urls URL", elsewhere(world), world_model_urls=("URL",))
    if config.dreaming.judge == "policy" and not config.judge_urls:
        change("--judge-urls URL", elsewhere(agent), judge_urls=("URL",))
        change("--dreaming.judge current", "the judge learns along, and may learn to be fooled",
               dreaming=replace(config.dreaming, judge="current"))
    least = math.ceil(10 * agent.kv(config.context, 1)) / 10
    if least < config.policy_engine.kv_cache_gb:
        change(f"--policy-engine.kv-cache-gb {least}", "turns wait for a place",
               policy_engine=replace(config.policy_engine, kv_cache_gb=least))
    return changes


def tuning(config: recipe.WorldModelSFT | recipe.PolicySFT, gpu: Card, model: Model, ranks: int,
           trainer: Trainer, kind: str) -> Memory:
    """Of a fine-tuning, which is an update without dreams."""
    title = f"fine-tuning {model.name}" + " with LoRA" * ("adapters" in kind)
    rows = [replace(row, dreaming=0.0) for row in trainer_rows(trainer, config.sft.tokens, ranks, kind)]
    return Memory(title, gpu, rows, trainer, config.sft.tokens, config.context)


def plan_world_model(config: recipe.WorldModelSFT, card: str = "H100-80GB", ranks: int = 8) -> Plan:
    """The plan of sft.py world_model, with its annotation. Raises ValueError for an unknown card or model."""
    gpu, world, lora = read_card(card), read_model(config.base), config.lora_rank
    trainer = simulate(world.config, ranks, sorted({config.sft.tokens, config.context}), lora)
    kind = f"bf16, and adapters of rank {lora}" if lora else "float32, and Adam"
    memory, changes = tuning(config, gpu, world, ranks, trainer, kind), []
    if memory.fits and memory.fits < config.context:
        changes.append(Change(f"--context {memory.fits}", gpu.memory - memory.update_on(memory.fits),
                              "longer transitions are dropped and counted"))
    if not memory.fits:
        changes.append(Change("more ranks, or a larger card", gpu.memory - memory.update_on(1024),
                              "one layer, gathered, and its shard do not fit"))
    adapters = 4 * 2 * lora * world.config.hidden_size * world.config.num_hidden_layers
    states = 12 * (adapters or world.parameters) / GB
    # A smaller model learns the sentence that code writes (world_model.write_reason).
    def staged(f) -> list[Stage]:
        pages = pages_of(config.transitions, f)
        target = delta_tokens(f=f, pages=pages)
        return [hours.preparing(f, ranks, pages),
                *[hours.annotation(f, world, gpu, ranks)] * bool(world.experts),
                hours.fine_tuning(f, "fine-tune the world model", world, config, gpu, ranks,
                                  pages.transitions, target, bool(lora), pages=pages, share=pages.world)]

    stages, recorded = hours.ranged(staged), pages_of(config.transitions).recorded
    disk = {"recorded pages": RECORDED * recorded} if recorded else {"NNetNav's data": DATA}
    disk |= {"its transitions, as tokens": PREPARED * stages[0].tokens / GB,
            "the world model, as published": world.folder,
            "its checkpoints": 3 * states, "the same, fine-tuned and merged": world.folder}
    return Plan(memory, changes, host(ranks, states), disk, stages)


def plan_policy(config: recipe.PolicySFT, card: str = "H100-80GB", ranks: int = 8, rows: int = 0,
                target: float = 0.0, name: str = "fine-tune the agent") -> Plan:
    """The plan of sft.py policy, of all rows (0), or of a training on others (rivals/orm.py: with a verdict
    each). It learns no judging: that is tiny/lessons.py's, of the laptop's recipe only. Raises ValueError for
    an unknown card or model."""
    gpu, agent = read_card(card), read_model(config.base)
    simulated = simulate(agent.config, ranks, sorted({config.sft.tokens, config.context}))

    def memory(offload: bool) -> Memory:
        kind = "float32, and Adam" + ", in host memory" * offload
        return tuning(config, gpu, agent, ranks, replace(simulated, offload=offload), kind)

    changes = [] if config.offload else [Change(
        "--offload", memory(True).free,
        f"{16 * agent.parameters / GB:.0f} GB of host memory, and slower steps")]
    def staged(f) -> list[Stage]:
        pages = pages_of(config.trajectories, f)
        return [hours.fine_tuning(f, name, agent, config, gpu, ranks, rows or pages.rows,
                                  target or pages.answer, offload=config.offload, pages=pages)]

    stages = hours.ranged(staged)
    # Its checkpoints are gone before the dreaming has some.
    disk = {f"the agent's base ({agent.name})": agent.folder,
            "its examples, as tokens": PREPARED * stages[0].tokens / config.sft.epochs / GB}
    states = host(ranks, 12 * agent.parameters / GB, config.offload)
    return Plan(memory(config.offload), changes, states, disk, stages)


@dataclass(frozen=True)
class WebRL(recipe.Train):
    """What the plan asks of rivals/webrl.py's config beside train.py's."""

    goals: int = 500
    batch: int = 128
    replay: float = 2.0
    breed: int = 2


# The sizes of rivals/webrl.py's `llama` and rivals/orm.py's: no rival is imported here.
WEBRL = WebRL(policy="stanfordnlp/llama8b-nnetnav-wa", updates=8, judge_context=24576,
              judge_server=recipe.ServerConfig(kv_cache_gb=2.0),
              dreaming=dream.Config(horizon=30, temperature=1.0, max_new_tokens=1024))
ORM = recipe.PolicySFT(base="meta-llama/Llama-3.1-8B-Instruct", context=16384,
                       sft=finetune.FineTune(epochs=4, lr=5e-6, tokens=16384, microbatches=64))


def plan_orm(config: recipe.PolicySFT, card: str = "H100-80GB", ranks: int = 8) -> Plan:
    """The plan of rivals/orm.py (`config`: its LLAMA): that of sft.py policy, on labelled tries, of which a
    verdict is learned."""
    plan = plan_policy(config, card, ranks, TRIES, VERDICT, "train the reward model")
    disk = {"the trained reward model": read_model(config.base).folder} | {
        what.replace("the agent's", "its"): size for what, size in plan.disk.items()}
    memory = replace(plan.memory, title=f"the reward model: {plan.memory.title}")
    return replace(plan, memory=memory, disk=disk)


def plan_webrl(config: recipe.Train, card: str = "H100-80GB", ranks: int = 8) -> tuple[Plan, list[Stage]]:
    """(the plan of rivals/webrl.py on WebArena's sites, with its last phase; the stages of all phases).
    `config`: its LLAMA. It is train.py's plan with the world model elsewhere and the reward model, as large
    as the agent, in the judge's place. Raises ValueError as plan_train does."""
    def asked(*given) -> list[Sampler]:
        acts, answers, judges = roles(*given)
        return [acts, answers, replace(judges, name="reward model server", mean=PAGE + VERDICT)]

    own = {each.name: getattr(config, each.name) for each in fields(recipe.Train)}
    same = recipe.Train(**own | {"world": "dream", "world_model_urls": ("none",),
                                 "dreaming": recipe.Train().dreaming})
    agent, gpu = read_model(config.policy), read_card(card)
    samplers(same, agent, agent, ranks)  # an error names the flag that there is
    planned, (acts, _, judges) = plan_train(same, card, ranks, asked), asked(same, agent, agent, ranks)
    memory = replace(planned.memory, title=f"{agent.name} on real sites", before="acting")
    changes = [each for each in planned.changes if "dreaming" not in each.what]  # no other model can judge
    # Each rank holds them gathered, stacked, scaled, once more, and in float64 (webrl_loss.fit).
    turns = config.goals * config.dreaming.horizon * (1 + config.replay)
    size = ranks * turns * (4 * 4 + 8) * agent.config.hidden_size / GB
    phases = [hours.ranged(lambda f, n=n: hours.webrl_phase(
        f, n, config, agent, gpu, ranks, acts.speed(gpu, f), judges.speed(gpu, f), WebArena.at_once))
        for n in range(config.updates)]
    every = [total(part, part[-1].name, part[-1].why.split(";")[0]) for part in zip(*phases)]
    return replace(planned, memory=memory, changes=changes, stages=phases[-1],
                   host=planned.host | {f"the critic's states of {turns:,.0f} turns": size}), every


# ---- the report --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """The three trainings: of the dreams, of the world model and of the agent."""

    dreaming: recipe.Train = recipe.Train()
    learning: recipe.WorldModelSFT = recipe.WorldModelSFT()
    cloning: recipe.PolicySFT = recipe.PolicySFT()

    def fits(self, card: str, ranks: int) -> bool:
        return (plan_train(self.dreaming, card, ranks).memory.free >= 0
                and plan_policy(self.cloning, card, ranks).memory.free >= 0
                and plan_world_model(self.learning, card, ranks).memory.free >= 0)

    def given(self, flags: tuple[str, str, str]) -> "Recipe":
        """The recipe with flags for both of sft.py and train.py, read as these read them."""
        parts = zip((self.learning, self.cloning, self.dreaming), flags)
        learning, cloning, dreaming = (tyro.cli(type(part), default=part, args=text.split())
                                       for part, text in parts)
        return Recipe(dreaming, learning, cloning)


def planned(trainings: Recipe, card: str, ranks: int) -> tuple[dict[str, Plan], list[Stage]]:
    """The plans of the three trainings, in their order, and the stages of the whole recipe."""
    dreaming, recorded = trainings.dreaming, pages_of(trainings.dreaming.trajectories).recorded
    plans = {"world model": plan_world_model(trainings.learning, card, ranks),
             "agent": plan_policy(trainings.cloning, card, ranks),
             "dreaming": plan_train(dreaming, card, ranks)}
    tasks = len(MINIWOB) if recorded else TASKS
    each_pass = tasks / dreaming.dreaming.tasks
    updates = math.ceil(dreaming.epochs * each_pass) or dreaming.updates
    dreams = total([total(plans["dreaming"].stages)] * updates, f"{updates:,} updates of dreams",
                   f"a pass over {tasks:,} tasks is {each_pass:,.0f}")
    stages = [*plans["world model"].stages, *plans["agent"].stages, dreams]
    if recorded:  # what such pages take beside the trainings
        acts = roles(dreaming, read_model(dreaming.policy), read_model(dreaming.world_model), ranks)[0]
        first, *after = hours.ranged(lambda f: hours.around(f, dreaming, acts.speed(read_card(card), f)))
        stages = [first, *stages, *after]
    return plans, stages


def report(trainings: Recipe, card: str = "H100-80GB", ranks: int = 8) -> str:
    """What the command prints: the memory of the three trainings, then host, disk and hours of the whole
    recipe."""
    plans, stages = planned(trainings, card, ranks)
    lines = printed.whole(f"{ranks} x {card}", plans)
    lines += [*printed.table("One update of dreams", plans["dreaming"].stages, "s"), "",
              *printed.table("The recipe", stages, "h"), ""]
    if pages_of(trainings.dreaming.trajectories).recorded:
        of = trainings.learning, trainings.cloning, trainings.dreaming
        return "\n".join([*lines, *printed.differences(*of), "", *printed.RECORDED_ASSUMPTIONS])
    if read_model(trainings.dreaming.world_model).experts:
        lines += printed.SINKS
    return "\n".join(lines + printed.ASSUMPTIONS)


def webrl_report(card: str, ranks: int) -> str:
    """What `webrl` prints: the memory of reward model and agent, then host, disk, and hours of a phase and of
    all."""
    judging, (acting, phases) = plan_orm(ORM, card, ranks), plan_webrl(WEBRL, card, ranks)
    lines = [*printed.whole(f"{ranks} x {card}", {"reward model": judging, "agent": acting}),
             *printed.table(f"Phase {WEBRL.updates}, the longest", acting.stages, "min"), "",
             *printed.table(f"The recipe, {WEBRL.updates} phases", [*judging.stages, *phases], "h"), ""]
    return "\n".join(lines + printed.WEBRL_ASSUMPTIONS)


# ---- python -m node.plan -----------------------------------------------------------------------------------

Flags = tuple[str, str, str]  # for sft.py world_model, sft.py policy and train.py
SINGLE = Recipe(recipe.SINGLE, recipe.SINGLE_WORLD_MODEL, recipe.SINGLE_POLICY)
# `single` with NNetNav's pages, which are some twenty times as long, and with Llamas, which want a licence.
# The judge is the SFT agent, as in the paper.
KV = "--world-model-server.kv-cache-gb {} --policy-engine.kv-cache-gb {}"
LLAMAS = "--policy runs/single/llama_sft --world-model runs/single/{} --out runs/single/llama_dream"
LONG = ("--trajectories nnetnav-live/train.jsonl --judge-model= --updates 1000 --evaluate-every 0 "
        "--context 16384 --world-model-context 24576 --judge-context 32768 --dreaming.max-new-tokens 2048 "
        "--dreaming.world-model-tokens 10240 --dreaming.judge-tokens 1024")
NNETNAV: Flags = (
    "--base meta-llama/Llama-3.2-3B-Instruct --transitions nnetnav-live/train.jsonl --context 24576 "
    "--sft.microbatches 8 --out runs/single/llama_world_model",
    "--base meta-llama/Llama-3.2-1B-Instruct --trajectories nnetnav-live/train.jsonl --context 16384 "
    "--sft.microbatches 8 --out runs/single/llama_sft",
    f"{LLAMAS.format('llama_world_model')} {LONG} --judge-server.kv-cache-gb 3 " + KV.format(12, 3))
RECIPES = {"paper": (Recipe(), 8), "single": (SINGLE, 1), "nnetnav": (SINGLE.given(NNETNAV), 1)}


def added(*more: str) -> Flags:
    """NNETNAV with more flags; of two that are given, tyro takes the last."""
    first, second, third = (f"{flags} {words}".strip() for flags, words in zip(NNETNAV, more))
    return first, second, third


# The flags of each recipe for one GPU, in the order in which they are tried; the first that fit a card are
# planned. Offloading costs hours only. Below it are other models that judge and dream: an agent that judges
# itself as it is now, and a world model of 1B.
SMALLER: dict[str, list[Flags]] = {
    "single": [("", "", ""), ("", "", "--offload"),
               ("", "", "--offload --tokens 4096 --judge-server.kv-cache-gb 0.95 " + KV.format(0.7, 0.7))],
    "nnetnav": [
        NNETNAV, added("", "", "--offload"),
        added("", "", "--offload --judge-server.kv-cache-gb 1.2 " + KV.format(6, 1.5)),
        added("--base meta-llama/Llama-3.2-1B-Instruct --out runs/single/llama_world_model_1b", "--offload",
              "--offload --dreaming.judge current --world-model runs/single/llama_world_model_1b "
              + KV.format(2.5, 1.5))]}


def commands(flags: Flags, which: str) -> str:
    """The lines to type, in order: the rehearsal first, with flags of two of the trainings."""
    first, _, last = flags
    typed = []
    rehearsal = f'--world-model-flags="{first}" ' * bool(first) + f'--train-flags="{last}"' * bool(last)
    programs = f"-m node.rehearse {which}", *(f"{name} single" for name in (
        "sft.py world_model", "sft.py policy", "train.py"))
    for program, words in zip(programs, (rehearsal, *flags)):
        line = textwrap.wrap(f"python {program} {words}", 100, break_on_hyphens=False)
        typed.append("    " + " \\\n        ".join(line))
    return "\n".join(typed)


def fitting(which: str, card: str, ranks: int, more: str = "") -> Flags | None:
    """The first flags of SMALLER with which all three trainings fit; None when none do. `more`: flags that
    train.py gets as well."""
    each = ((*flags[:-1], f"{flags[-1]} {more}".strip()) for flags in SMALLER[which])
    return next((flags for flags in each if SINGLE.given(flags).fits(card, ranks)), None)


def command(which: str = "paper", /, card: str = "H100-80GB", ranks: int | None = None,
            train_flags: str = "") -> str:
    """What a recipe takes of each GPU, of the host, of the disk and of your time.

    Args:
        which: paper; single; nnetnav (single with NNetNav's pages and Llamas); or webrl (rivals/webrl.py on
            WebArena's sites).
        card: The GPU. A wrong name is answered with the known names.
        ranks: How many of them. single and nnetnav have 1, the others have 8.
        train_flags: Flags that train.py will get: --train-flags="--world-model Qwen/WebWorld-8B".
    """
    if ranks is not None:
        data.check_counts(1, ranks=ranks)
    if which == "webrl":
        if train_flags:
            raise ValueError(f"--train-flags {train_flags!r}: webrl has none; see WEBRL in node/plan.py")
        return webrl_report(card, ranks or 8)
    if which not in RECIPES:
        raise ValueError(f"recipe {which!r} is not known; known are {', '.join(RECIPES)}, webrl")
    planned, ranks = RECIPES[which][0], ranks or RECIPES[which][1]
    if which in SMALLER and ranks == 1 and (flags := fitting(which, card, ranks, train_flags)):
        first = f"    {recipe.RECORD}\n" if which == "single" else ""
        return f"What fits this card:\n\n{first}{commands(flags, which)}\n\n" + report(
            SINGLE.given(flags), card, ranks)
    return report(planned.given(("", "", train_flags)), card, ranks)


def main():
    try:
        print(tyro.cli(command, prog="python -m node.plan"))
    except ValueError as error:
        sys.exit(f"node.plan: {error}")


if __name__ == "__main__":
    main()
