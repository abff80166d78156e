"""How long: tokens and hours of each stage of a recipe, by arithmetic on figures that others measured.

Each figure has its source; one without is called an assumption. What nobody has measured is a range: LIKELY,
and its ends SLOW and FAST. Every stage is reckoned three times, with all figures at one end at once.

All ranks wait for the dream that ends last. Its time is that of its own answers, written beside the others'
one after the other, or of all answers where a cache has place for few. Pages and deltas have the lengths of
recorded ones, drawn anew in each of BATCHES batches.

Units: GB is 1e9 bytes; tokens are the model's; a rate is tokens/s.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import distributed
import finetune
import lm
import recipe
from node.sizes import CARDS, GB, Card, Model

# NNetNav's data (NOTES 2.7). nnetnav-live's train.jsonl is 3.19 GB in 48,333 rows
# (huggingface.co/datasets/stanfordnlp/nnetnav-live/tree/main). A row of 66 kB holds the page twice
# ("messages" and "prompt"): 33 kB, at an assumed 3.7 bytes a token.
ROWS = 48_333
TRANSITIONS = 43_316  # rows with a successor (NOTES 2.7): what is annotated and what the world model learns
PAGE = 9_000
ANSWER = 300  # tokens of thought and action (NOTES 10.7: 1,500 in 5 turns)
TRIES = 12_200  # labelled ones, that WebRL's reward model learns from (NOTES 12.1)
VERDICT = 5  # tokens: COMPLETED, YES or NO, and the end of the turn

Dream = list[tuple[float, float]]  # tokens of each turn's page, and of the world model's answer to it
WORKERS = 32  # that prepare examples at most (node/prepare.py)
BATCHES = 60  # of dreams whose lengths are drawn, always the same ones
SAMPLE = 4_000  # sequences of a fine-tuning that are drawn and dealt to the ranks
FORWARD = 0.25  # of forward, recomputation and backward (1 + 1 + 2)
FROZEN = 0.75  # of the same, where weights have no gradient (1 + 1 + 1)


@dataclass(frozen=True)
class Figures:
    """What the hours rest on. On another card than the source's, training and prefill scale with its bf16
    flops, decoding with its bandwidth."""

    # ---- lengths ----
    inside: tuple[float, ...] = (.002, .003, .007, .020, .040, .081, .136, .196, .343, .489)
    """A delta as a share of the next page, where the route stays: the middles of tenths of 245 transitions,
    by random clicks in four applications of WebArena-Infinity, ids aligned (docs/LOG.md)."""
    between: tuple[float, ...] = (.165, .388, .503, .549, .576, .631, .693, .732, .789, .861)
    """The same where it changes, 99 transitions (docs/LOG.md). Medians: .06 and .61; others saw .03 and .71
    there."""
    navigation: float = 0.2
    """Share of the actions that lead to another page. With .2 the mean delta is .23 of the next page, as over
    98 transitions of two real sites (NOTES 2.7), whose median, .06, would say less."""
    page_spread: float = 0.7
    """Standard deviation of a page's logarithm: .5 to .9 where 36 to 48 % of the pages are over 8,192 tokens
    (NOTES 2.7); .66 over the 344 transitions."""
    stops: float = 0.0
    """Chance of each turn of a dream to be its last. 0: all dreams take all turns (the safe side)."""
    reason: int = 80
    """Tokens of r: the one or two sentences that node.annotate asks for (assumption)."""
    annotation: int = 500
    """Tokens that the annotator thinks and writes (assumption; its limit is 4,096)."""

    # ---- speeds: tokens/s a GPU where nothing else is said (NOTES 10.6) ----
    train_8b: float = 5_762 * 0.85
    """torchtitan, Llama-3.1-8B on 8 H100, 8k, selective checkpointing; 0.85: ours is full (assumption)."""
    train_oss: float = 0.15
    """Share of the card's flops while gpt-oss learns: 4 of 128 experts a token (assumption; between SLOW and
    FAST)."""
    head: float = 0.75
    """Share of the card's float32 flops in lm.py's head (assumption, NOTES 10.2)."""
    prefill: float = 0.4
    """Share of the card's flops while a dense model reads (assumption)."""
    prefill_oss: float = 13_500
    """gpt-oss-120b over 8 H100 (TP 8): 12 to 15 thousand a GPU, by how much slower 4 and 8 requests of
    8k/1k write than those of 1k/1k (reckoned from InferenceX #828, a sweep with vLLM)."""
    decode_oss: tuple[tuple[int, float], ...] = (
        (1, 286), (4, 1_075), (8, 1_975), (16, 3_313), (32, 5_498), (64, 8_696))
    """(answers at once, tokens/s of 8 H100 together), TP 8: 4 to 64 from InferenceX #828 (ms a token, 1k/1k;
    1k/8k: the same to 6 % up to 32). 1: ms a token as on 8 MI300X, .94 of those of 4 (InferenceX #1092). On 8
    H200 it was 1,948 for 8 and 12,781 for 128 (vllm #30326)."""
    decode: float = 0.7
    """Share of the bandwidth at which others write (assumption)."""
    nvlink: float = 350
    """GB/s a GPU that an all-gather reaches on 8 H100 (NOTES 10.8: 1.3 to 1.6 s for 2 x 233 GB)."""
    pcie: float = 20
    """GB/s between a GPU and the host (assumption: PCIe 4.0 x 16, 32 on paper)."""
    host: float = 50
    """GB/s of host memory that Adam's step on the CPU reaches (assumption)."""
    slices: float = 1.5
    """A server's step takes this many times as long for each engine that is busy beside it, one on the other:
    slices ** busy. 1: they run beside each other, which needs CUDA's MPS. 2: CUDA gives the processes of a
    GPU time slices, and a step over 8 GPUs waits for the slowest (simulated: 2.0, 4.0, 8.8, 16.5 times as
    long beside 1 to 4 busy engines, NOTES 7.13). Between them is an assumption. On a single GPU it is 2: both
    read memory."""
    preparing: float = 0.045
    """Core-seconds a transition: half an hour for all on one core (NOTES 2.8, on two shared cores). Other
    cores are the range (assumption)."""
    cores: int = 12
    """Of the host, for each GPU (assumption)."""
    sync: float = 5.0
    """Seconds for new weights to reach the engine (assumption)."""

    # ---- WebRL on real sites ----
    try_turns: float = 15
    """Turns of a try of up to 30 (assumption; SLOW: all tries take all)."""
    real_step: float = 3.0
    """Seconds from an action until its page is read: the site, and BrowserGym's wait of .5 (assumption; with
    16 browsers at once on one machine 14.8, mll-lab-nu/VAGEN #104)."""
    real_reset: float = 10.0
    """Seconds of a new browser with its logins (assumption; there 17.1)."""
    successes: float = 0.3
    """Share of the tries: between the SFT agent's .21 and WebRL's .42 (NOTES 12.2)."""
    teacher: float = 3.0
    """Seconds until the teacher has said of a goal whether it can be done (assumption); a rank asks one after
    the other (rivals/curriculum.py)."""


LIKELY = Figures()
SLOW = replace(
    LIKELY, navigation=0.4, reason=200, slices=2.0, annotation=1_000,
    train_8b=5_762 * 0.6,  # transformers' layers instead of torchtitan's (assumption)
    train_oss=0.08,  # torchtitan's own first run on 8 B200: 8.1 % (torchtitan #4604)
    head=0.5, prefill=0.3, prefill_oss=11_900, decode=0.5,
    # After vllm #29708: 1,686 for 8 and 8,684 for 128 (vllm #30326), .87 and .68 of those before.
    decode_oss=tuple((n, rate * (0.87 if n < 32 else 0.75)) for n, rate in LIKELY.decode_oss),
    nvlink=250, pcie=12, host=25, preparing=0.07, cores=6, sync=15.0,
    try_turns=30, real_step=14.8, real_reset=17.1, successes=0.42, teacher=10.0)
FAST = replace(
    LIKELY, navigation=0.1, stops=0.25, reason=50, slices=1.0, annotation=300, train_8b=5_762,
    train_oss=0.23,  # 231 TFLOP/s on 64 H100, with DeepEP (docs.nvidia.com/nemo/automodel, performance)
    head=0.9, prefill=0.55, decode=0.85,
    prefill_oss=34_491 / 2,  # over 2 H100, 4000/200 (docs.gpustack.ai, performance-lab/gpt-oss-120b/h100)
    nvlink=400, pcie=28, host=100, preparing=0.03, cores=24, sync=2.0,
    try_turns=8, real_step=1.5, real_reset=5.0, successes=0.21, teacher=1.0)


@dataclass(frozen=True)
class Stage:
    """One stage of the recipe: tokens that it handles, and seconds on all ranks: likely, and from `low` to
    `high`."""

    name: str
    tokens: float
    seconds: float
    why: str
    low: float = 0.0
    high: float = 0.0


def total(stages: Sequence[Stage]) -> Stage:
    add = lambda name: sum(getattr(stage, name) for stage in stages)
    return Stage("total", add("tokens"), add("seconds"), "", add("low"), add("high"))


def ranged(stages: Callable[[Figures], list[Stage]]) -> list[Stage]:
    """The stages of LIKELY, with seconds from FAST to SLOW."""
    return [replace(likely, low=fast.seconds, high=slow.seconds)
            for likely, fast, slow in zip(*(stages(figures) for figures in (LIKELY, FAST, SLOW)))]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def delta_tokens(limit: int, figures: Figures = LIKELY) -> float:
    """Mean tokens of the world model's answer: a reason, and a delta."""
    cut = lambda shares: mean([min(limit, share * PAGE) for share in shares])
    return figures.reason + (1 - figures.navigation) * cut(figures.inside) + figures.navigation * cut(
        figures.between)


# ---- rates -------------------------------------------------------------------------------------------------


def train_rate(model: Model, card: Card, lora: bool, figures: Figures = LIKELY) -> float:
    """Tokens/s a GPU, forward and backward with recomputation, without the head's float32 (see head)."""
    if lora and model.experts:  # frozen weights have no gradient: 2 FLOP a weight and token, three times
        return figures.train_oss * card.flops * 1e12 / (6 * model.active)
    rate = figures.train_8b * 8.03e9 / model.parameters * card.flops / CARDS["H100-80GB"].flops
    return rate / FROZEN if lora else rate


def head(model: Model, card: Card, lora: bool, tokens: float, figures: Figures = LIKELY) -> float:
    """Seconds that the float32 head takes a GPU, over so many target tokens: forward, again, and backward to
    the hidden states and, unless it is frozen, to its weights."""
    flops = 2 * model.config.vocab_size * model.config.hidden_size * (3 if lora else 4)
    return tokens * flops / (figures.head * card.float32 * 1e12)


def prefill_rate(model: Model, card: Card, figures: Figures = LIKELY) -> float:
    """Tokens/s a GPU that are read."""
    if model.experts:
        return figures.prefill_oss * 5.75e9 / model.active * card.flops / CARDS["H100-80GB"].flops
    return figures.prefill * card.flops * 1e12 / (2 * model.parameters)


def decode_rate(model: Model, card: Card, tp: int, at_once: float, context: float,
                figures: Figures = LIKELY) -> float:
    """Tokens/s of one server (all its GPUs together) that writes `at_once` answers."""
    if model.experts:  # straight in the logarithms between the measured points, and beyond the last
        points = figures.decode_oss
        k = max(1, sum(n < at_once for n, _ in points[:-1]))
        (a, rate_a), (b, rate_b) = points[k - 1], points[k]
        slope = math.log(rate_b / rate_a) / math.log(b / a)
        # Measured alike on H100 and H200: latency. A slower memory counts, and fewer GPUs in proportion.
        slower = min(1.0, card.bandwidth / CARDS["H100-80GB"].bandwidth)
        return rate_a * (at_once / a) ** slope * slower * tp / 8
    read = model.served(tp) + at_once * model.kv(context, tp)  # GB a step
    return at_once * figures.decode * card.bandwidth * 1000 / read


@dataclass(frozen=True)
class Sampler:
    """A model that answers many at once. `read`: tokens/s of prompts, before anything is written (a step of
    vLLM that reads 8,192 tokens takes as long as some twenty that only write). `write(n)`: tokens/s of n
    answers together. `places`: answers that have cache at once."""

    read: float
    write: Callable[[float], float]
    places: float

    def seconds(self, requests: float, prompts: float, written: float, longest: float) -> float:
        """Until the last of so many requests is over. Each has `prompts` tokens to read; they write `written`
        tokens in the mean, one of them `longest`. They begin together and are written alike fast. So while
        the longest is written, `total` / `longest` are in the mean."""
        total = max(requests * written, longest)
        at_once = max(1.0, min(total / longest, self.places))
        return requests * prompts / self.read + total / self.write(at_once)


def offloading(model: Model, ranks: int, scored: float, learned: float, steps: int,
               figures: Figures = LIKELY) -> float:
    """Seconds that --offload adds: for each of `scored` microbatches a rank the float32 weights travel to the
    GPU once, for each of `learned` ones twice and the gradients back. Adam reads and writes 28 bytes a weight
    on the host. As if nothing overlapped."""
    weights = model.parameters / GB / ranks
    return weights * ((4 * scored + 12 * learned) / figures.pcie + 28 * steps / figures.host)


def spread(model: Model, server: recipe.ServerConfig, ranks: int) -> int:
    """GPUs that share a server's model: as many as it is given, where there are so many."""
    return model.tensor_parallel(min(ranks, server.tensor_parallel))


# ---- stages ------------------------------------------------------------------------------------------------


def dream_step(config: recipe.Train, agent: Model, world: Model, card: Card, ranks: int,
               places: dict[str, float]) -> list[Stage]:
    """One update of train.py, part by part: means of BATCHES batches. `places` of each sampler; a server
    elsewhere has place for all. The dreams' seconds are those of the dream that ends last."""
    return ranged(lambda figures: _dream_step(config, agent, world, card, ranks, places, figures))


def draw(config: recipe.Train, figures: Figures,
         rng: random.Random) -> tuple[list[Dream], list[list[float]]]:
    """A batch: the dreams, and the lengths of the turns of every trajectory, experts too. All pages of a
    group are as long as the page it starts on. A page that does not fit the agent drops its dreams."""
    d, dreams, learned = config.dreaming, [], []
    for _ in range(d.tasks):
        page = page_tokens(figures, rng)
        fits = page <= config.context - d.max_new_tokens
        for _ in range(d.group):
            if rng.random() < d.expert_fraction * d.demonstrated:  # a window of 1 to `horizon` steps
                learned += [[page + ANSWER] * rng.randint(1, d.horizon)] * fits
                continue
            turns = 1
            while turns < d.horizon and rng.random() >= figures.stops:
                turns += 1
            kinds = [figures.between if rng.random() < figures.navigation else figures.inside
                     for _ in range(turns)]
            if fits:
                dreams.append([(page, min(d.world_model_tokens, figures.reason + page * rng.choice(kind)))
                               for kind in kinds])
                learned.append([page + ANSWER] * turns)
    return dreams, learned


def page_tokens(figures: Figures, rng: random.Random) -> float:
    return PAGE * rng.lognormvariate(-figures.page_spread**2 / 2, figures.page_spread)  # its mean is PAGE


def samplers(config: recipe.Train, agent: Model, world: Model, card: Card, ranks: int,
             places: dict[str, float], figures: Figures) -> dict[str, Sampler]:
    """Each rank's engine, the world model's server, and who judges."""
    def sampler(model: Model, server: recipe.ServerConfig | recipe.EngineConfig, tp: int, context: float,
                name: str) -> Sampler:
        return Sampler(prefill_rate(model, card, figures) * tp,
                       lambda n: decode_rate(model, card, tp, n, context, figures),
                       max(1, min(server.max_num_seqs, places.get(name, math.inf))))

    tp, judges = (spread(model, server, ranks) for model, server in (
        (world, config.world_model_server), (agent, config.judge_server)))
    judge = {"policy": (agent, config.judge_server, judges, 2 * PAGE, "judge server"),
             "current": (agent, config.policy_engine, 1, 2 * PAGE, "policy engine"),
             "world_model": (world, config.world_model_server, tp, 2 * PAGE, "world model server")}
    return {"engine": sampler(agent, config.policy_engine, 1, PAGE, "policy engine"),
            "world": sampler(world, config.world_model_server, tp, 1.5 * PAGE, "world model server"),
            "judge": sampler(*judge[config.dreaming.judge])}


def dreaming(dreams: list[Dream], by: dict[str, Sampler], ranks: int, slices: float,
             current: bool) -> tuple[float, float, float]:
    """Seconds in which the agent acts, the world model answers and the judge judges, in the dream that ends
    last. `current`: a rank's own engine judges its dreams, else the last verdict is alone."""
    if not dreams:  # a context that hardly any page fits
        return 0.0, 0.0, 0.0
    count, each = len(dreams), len(dreams) / ranks
    read = [sum(page for page, _ in dream) for dream in dreams]
    written = [sum(prediction for _, prediction in dream) for dream in dreams]
    turns = [ANSWER * len(dream) for dream in dreams]
    acts = by["engine"].seconds(each, mean(read), mean(turns), max(turns))
    imagines = by["world"].seconds(count, mean(read), mean(written), max(written))
    page = mean([dream[-1][0] for dream in dreams])
    judges = by["judge"].seconds(each if current else 1, 2 * page, ANSWER, ANSWER)
    busy = acts / (acts + imagines)
    # The mean of slices ** m, where each of the ranks is busy with this chance; an engine has one server.
    return acts * slices, imagines * (1 + (slices - 1) * busy) ** ranks, judges


def _dream_step(config: recipe.Train, agent: Model, world: Model, card: Card, ranks: int,
                places: dict[str, float], figures: Figures) -> list[Stage]:
    by, rng = samplers(config, agent, world, card, ranks, places, figures), random.Random(0)
    slices = 1.0 if config.world_model_urls else 2.0 if ranks == 1 else figures.slices
    current = config.dreaming.judge == "current"
    batches: list[list[float]] = []  # of each the sums that are unpacked below
    for _ in range(BATCHES):
        dreams, rows = draw(config, figures, rng)
        turns = [turn for dream in dreams for turn in dream]
        rng.shuffle(rows)
        costs = []  # of each minibatch those of its microbatches
        for k in range(config.minibatches):
            row = [length for row in rows[k :: config.minibatches] for length in row]
            costs.append([sum(row[i] for i in batch) for batch in lm.microbatches(row, config.tokens)])
        batches.append([*dreaming(dreams, by, ranks, slices, current), len(dreams), len(turns),
                        sum(page for page, _ in turns), sum(prediction for _, prediction in turns),
                        sum(map(sum, costs)), sum(distributed.slowest(cost, ranks) for cost in costs),
                        sum(math.ceil(len(cost) / ranks) for cost in costs)])
    acts, imagines, judges, dreams, turns, read, written, learned, most, rounds = map(mean, zip(*batches))
    rate = train_rate(agent, card, False, figures)
    scorings = 2 - 1 / config.minibatches  # old log-probs of all, new ones of all but the first minibatch
    passes = 1 + FORWARD * scorings
    update = most * passes / rate
    update += head(agent, card, False, most * ANSWER / (PAGE + ANSWER) * passes, figures)
    updating = f"{passes:.2f} passes; slowest rank {most * ranks / (learned or 1):.2f} x the mean"
    if config.offload:
        slower = offloading(agent, ranks, rounds * scorings, rounds, config.minibatches, figures)
        update, updating = update + slower, f"{passes:.2f} passes; {slower:,.0f} s of it to offload"
    return [Stage("the agent acts", read + turns * ANSWER, acts, "in the dream that ends last"),
            Stage("the world model answers", read + written, imagines,
                  f"there; {written / (turns or 1):,.0f} tokens each"),
            Stage("the agent judges", dreams * (2 * read / (turns or 1) + ANSWER), judges,
                  "there; two pages"),
            Stage("update", learned, update, updating),
            Stage("weights to the engine", 0, figures.sync, "assumption")]


def preparing(ranks: int) -> Stage:
    """All transitions aligned, diffed and tokenised, by WORKERS of the node's cores."""
    def stage(figures: Figures) -> list[Stage]:
        cores = min(WORKERS, figures.cores * ranks)
        return [Stage("prepare the examples", TRANSITIONS * PAGE, TRANSITIONS * figures.preparing / cores,
                      f"{figures.preparing * 1000:.0f} ms a transition, {cores} cores")]

    return ranged(stage)[0]


def annotation(world: Model, card: Card, ranks: int) -> Stage:
    """r for every recorded transition, by the untrained world model, 64 at a time (node.annotate's
    workers)."""
    def stage(figures: Figures) -> list[Stage]:
        read, tp = PAGE + delta_tokens(10**9, figures), world.tensor_parallel(ranks)
        seconds = TRANSITIONS * read / (prefill_rate(world, card, figures) * ranks)
        seconds += TRANSITIONS * figures.annotation / decode_rate(world, card, tp, 64, read, figures)
        return [Stage("annotate the transitions", TRANSITIONS * (read + figures.annotation), seconds,
                      f"{figures.annotation} tokens written on each; 64 at once")]

    return ranged(stage)[0]


def learning(rows: int, target: float, context: int, config: finetune.FineTune, ranks: int,
             figures: Figures) -> tuple[float, float, float]:
    """Tokens that a fine-tuning on so many rows learns, those that a rank learns or waits for, and its
    microbatches. `target` tokens are learned behind each page."""
    rng = random.Random(0)
    lengths = [int(page_tokens(figures, rng) + target) for _ in range(SAMPLE)]
    lengths = [length for length in lengths if length <= context]
    steps = finetune.schedule(lengths, config)
    costs = [[sum(lengths[i] for i in batch) for batch in step] for step in steps]
    whole, most = sum(map(sum, costs)), sum(distributed.slowest(step, ranks) for step in costs)
    each = sum(math.ceil(len(step) / ranks) for step in steps)
    return rows / SAMPLE * whole, rows / SAMPLE * most, rows / SAMPLE * each


def world_model_sft(world: Model, config: recipe.WorldModelSFT, card: Card, ranks: int) -> Stage:
    """Its fine-tuning: the arithmetic of the slowest rank of each step, and between the ranks twice a layer's
    bf16 weights for each microbatch."""
    def stage(figures: Figures) -> list[Stage]:
        written, lora = delta_tokens(10**9, figures), bool(config.lora_rank)
        tokens, most, each = learning(TRANSITIONS, written, config.context, config.sft, ranks, figures)
        gathering = each * 2 * 2 * world.parameters / GB * (ranks - 1) / ranks / figures.nvlink
        scoring = head(world, card, lora, most * written / (PAGE + written), figures)
        rate = train_rate(world, card, lora, figures)
        why = f"{rate:,.0f}/s a GPU; head {scoring / 3600:.1f} h"
        if ranks > 1:
            why += f", weights {gathering / 3600:.1f} h"
        return [Stage("fine-tune the world model", tokens, gathering + scoring + most / rate, why)]

    return ranged(stage)[0]


def policy_sft(agent: Model, config: recipe.PolicySFT, card: Card, ranks: int, rows: int = ROWS,
               target: float = ANSWER) -> Stage:
    """Its cloning, of all rows. It learns no judging: that is tiny/lessons.py's, of the laptop's recipe only.
    With rows of a verdict each: a reward model's training (rivals/orm.py)."""
    def stage(figures: Figures) -> list[Stage]:
        tokens, most, each = learning(rows, target, config.context, config.sft, ranks, figures)
        rate, why = train_rate(agent, card, False, figures), "in the total; published agents spare it"
        seconds = most / rate + head(agent, card, False, most * target / (PAGE + target), figures)
        if "single" in config.out.split("/"):  # nobody has published an agent of its size
            why = f"{rate:,.0f}/s a GPU"
        if config.offload:
            steps = math.ceil(each * ranks / config.sft.microbatches)
            slower = offloading(agent, ranks, 0, each, steps, figures)
            seconds, why = seconds + slower, f"{why}; {slower / 3600:.1f} h to offload"
        return [Stage("fine-tune the agent", tokens, seconds, why)]

    return ranged(stage)[0]


# ---- WebRL (rivals/webrl.py, config: its own) --------------------------------------------------------------


def webrl(config: recipe.Train, agent: Model, card: Card, ranks: int, places: dict[str, float],
          at_once: int) -> tuple[list[Stage], list[Stage]]:
    """(the last phase, part by part; the same parts of all phases). The buffer grows from phase to phase.
    `at_once`: browsers of a rank. One part comes after the other, as in the code."""
    phases = [ranged(lambda figures, n=n: _webrl_phase(config, agent, card, ranks, places, at_once, n,
                                                       figures)) for n in range(config.updates)]
    return phases[-1], [replace(total(part), name=part[-1].name, why=part[-1].why.split(";")[0])
                        for part in zip(*phases)]


def _webrl_phase(config: recipe.Train, agent: Model, card: Card, ranks: int, places: dict[str, float],
                 at_once: int, n: int, figures: Figures) -> list[Stage]:
    tries = math.ceil(config.goals / (ranks * at_once))  # of each browser, one after the other
    new = config.goals * (turns := min(figures.try_turns, config.dreaming.horizon))
    # All of it within the perplexities' window (the safe side).
    buffer = n * figures.successes * new if config.replay else 0.0
    old, bred = min(config.replay * new, buffer), config.breed * config.goals
    both, rate = PAGE + ANSWER, train_rate(agent, card, False, figures)
    steps = max(2, math.ceil((new + old) / config.batch))
    batch = finetune.FineTune(tokens=config.tokens,
                              microbatches=math.ceil(config.batch * both / config.tokens))
    tokens, most, rounds = learning(1, ANSWER, config.context, batch, ranks, figures)  # of a turn

    def trainer(turns: float, forwards: float, backward: int = 0) -> float:
        """Seconds of so many forward passes, and one with backward, over so many turns."""
        passes = backward + FORWARD * forwards
        scoring = head(agent, card, False, most * ANSWER / both, figures)
        slower = offloading(agent, ranks, rounds * turns * forwards, rounds * turns * backward,
                            steps * backward, figures) if config.offload else 0.0
        return turns * passes * (most / rate + scoring) + slower

    reads, tp = prefill_rate(agent, card, figures), spread(agent, config.judge_server, ranks)
    acting = at_once * (PAGE / reads + ANSWER / decode_rate(agent, card, 1, at_once, PAGE, figures))
    judge = Sampler(reads * tp, lambda n: decode_rate(agent, card, tp, n, PAGE, figures),
                    places.get("reward model server", math.inf))
    verdicts = judge.seconds(config.goals, PAGE, VERDICT, VERDICT)
    asked = config.goals * bool(bred)  # which goals can be done, of as many as the next phase may have
    return [Stage("the agent acts", new * both, tries * turns * acting, f"{turns:g} turns a try"),
            Stage("the sites answer", 0, tries * (figures.real_reset + turns * figures.real_step),
                  f"{figures.real_step:g} s a step; {ranks * at_once} browsers, {tries} tries each"),
            Stage("the reward model answers", config.goals * (PAGE + VERDICT), verdicts, "a page each"),
            Stage("perplexities", buffer * tokens, trainer(buffer, 1), f"of the buffer; {buffer:,.0f} turns"),
            Stage("states for the critic", (new + old + bred) * tokens, trainer(new + old + bred, 1),
                  f"and of bred goals; {new + old:,.0f} + {bred:,}"),
            Stage("the teacher answers", asked * PAGE, math.ceil(asked / ranks) * figures.teacher,
                  "its server is elsewhere, not in this plan"),
            Stage("a pass of the actor", (new + old) * tokens, trainer(new + old, 2 - 1 / steps, 1),
                  f"log-probs, too; {new:,.0f} + {old:,.0f} replayed"),
            Stage("weights to the engine", 0, figures.sync, "assumption")]
