"""How long: tokens and hours of each stage of a recipe, by arithmetic on figures that others measured.

FIGURES is the table. Each figure has its source; one without is called an assumption. What nobody has
measured is a range. Every stage is reckoned three times, with all figures at one end: FAST, LIKELY, SLOW.

All ranks wait for the dream that ends last. Its time is that of its own answers, written beside the others'
one after the other, or of all answers where a cache has place for few. Pages and deltas have the lengths of
recorded ones (Pages), drawn anew in each of BATCHES batches.

Units: GB is 1e9 bytes; tokens are the model's; a rate is tokens/s. f: one of the three ends of FIGURES.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import data
import distributed
import dream
import finetune
import lm
import recipe
from node.prepare import MOST_WORKERS
from node.sizes import CARDS, GB, Card, Model
from worlds.miniwob import TASKS

# ---- figures that have no range ----------------------------------------------------------------------------

# NNetNav's data (NOTES 2.7). nnetnav-live's train.jsonl is 3.19 GB in 48,333 rows
# (huggingface.co/datasets/stanfordnlp/nnetnav-live/tree/main). A row of 66 kB holds the page twice
# ("messages" and "prompt"): 33 kB, at an assumed 3.7 bytes a token.
ROWS = 48_333
TRANSITIONS = 43_316  # rows with a successor (NOTES 2.7): what is annotated and what the world model learns
PAGE = 9_000
# Standard deviation of a page's logarithm: .5 to .9 where 36 to 48 % of the pages are over 8,192 tokens
# (NOTES 2.7); .66 over the 344 transitions below.
SPREAD = 0.7
# A delta as a share of the next page, where the route stays: the middles of tenths of 245 transitions, by
# random clicks in four applications of WebArena-Infinity, ids aligned (docs/LOG.md). The same where it
# changes, 99 transitions. The medians are .06 and .61; others saw .03 and .71 there.
INSIDE = (.002, .003, .007, .020, .040, .081, .136, .196, .343, .489)
BETWEEN = (.165, .388, .503, .549, .576, .631, .693, .732, .789, .861)
ANSWER = 300  # tokens of thought and action (NOTES 10.7: 1,500 in 5 turns)
TRIES = 12_200  # labelled ones, that WebRL's reward model learns from (NOTES 12.1)
VERDICT = 5  # tokens: COMPLETED, YES or NO, and the end of the turn
FORWARD = 0.25  # of forward, recomputation and backward (1 + 1 + 2)
FROZEN = 0.75  # of the same, where weights have no gradient (1 + 1 + 1)
# (answers at once, tokens/s of 8 H100 together) of gpt-oss-120b, TP 8: 4 to 64 from InferenceX #828 (ms a
# token, 1k/1k; 1k/8k: the same to 6 % up to 32). 1: ms a token as on 8 MI300X, .94 of those of 4 (InferenceX
# #1092). On 8 H200 it was 1,948 for 8 and 12,781 for 128 (vllm #30326).
DECODE_OSS = ((1, 286), (4, 1_075), (8, 1_975), (16, 3_313), (32, 5_498), (64, 8_696))
# The same of MiniWoB++, counted on every 17th of the 4,800 recordings of 12 tasks that tiny/ ships, with
# Mistral's Tekken of 131,000 tokens, for no tokenizer of Qwen was at hand (NOTES 2.9). A turn's prompt has
# 518 tokens, of which 148 are the page; their logarithms have a standard deviation of .15. The world model
# reads 268, the judge 452.
MINIWOB_PAGE, MINIWOB_SPREAD, MINIWOB_WORLD, MINIWOB_JUDGE = 518, 0.15, 268 / 518, 452 / 518
MINIWOB_ANSWER, MINIWOB_VERDICT = 35, 100  # the second: one or two sentences (assumption)
MINIWOB_REASON = 17  # the line that is acted on, and the end
MINIWOB_DELTAS = tuple(n / MINIWOB_PAGE for n in (2, 2, 6, 10, 11, 11, 12, 12, 16, 25))  # middles of tenths
WON = 6_850 / 4_800  # steps of successes, for each of all 4,800 (of 39 other pages .87: tiny/pages.jsonl.gz)
TRIED_MODELS = 3  # the untrained one, the clone, and what dreamed
TRIED_SEEDS = 20  # of each task, for each of them
AT_ONCE = 16  # tries side by side (measure.play)
BATCHES = 60  # of dreams whose lengths are drawn, always the same ones
SAMPLE = 4_000  # sequences of a fine-tuning that are drawn and dealt to the ranks

# ---- figures with a range ----------------------------------------------------------------------------------

# name: (fast, likely, slow), below its source. Speeds are tokens/s a GPU where nothing else is said (NOTES
# 10.6). On another card than the source's, training and prefill scale with its bf16 flops, decoding with its
# bandwidth.
FIGURES = {
    # Share of the actions that lead to another page. With .2 the mean delta is .23 of the next page, as over
    # 98 transitions of two real sites (NOTES 2.7), whose median, .06, would say less.
    "navigation": (0.1, 0.2, 0.4),
    # Chance of each turn of a dream to be its last. 0: all dreams take all turns (the safe side).
    "stops": (0.25, 0.0, 0.0),
    # Tokens of r: the one or two sentences that node.annotate asks for (assumption).
    "reason": (50, 80, 200),
    # Tokens that the annotator thinks and writes (assumption; its limit is 4,096).
    "annotation": (300, 500, 1_000),
    # torchtitan, Llama-3.1-8B on 8 H100, 8k, selective checkpointing; .85: ours is full; .6: transformers'
    # layers instead of torchtitan's (assumptions).
    "train_8b": (5_762, 5_762 * 0.85, 5_762 * 0.6),
    # Share of the card's flops while gpt-oss learns: 4 of 128 experts a token. Fast: 231 TFLOP/s on 64 H100,
    # with DeepEP (docs.nvidia.com/nemo/automodel, performance). Slow: torchtitan's own first run on 8 B200,
    # 8.1 % (torchtitan #4604). Between them: assumption.
    "train_oss": (0.23, 0.15, 0.08),
    # Share of the card's float32 flops in lm.py's head (assumption, NOTES 10.2).
    "head": (0.9, 0.75, 0.5),
    # Share of the card's flops while a dense model reads (assumption).
    "prefill": (0.55, 0.4, 0.3),
    # gpt-oss-120b over 8 H100 (TP 8): 12 to 15 thousand a GPU, by how much slower 4 and 8 requests of 8k/1k
    # write than those of 1k/1k (reckoned from InferenceX #828, a sweep with vLLM). Fast: over 2 H100,
    # 4000/200 (docs.gpustack.ai, performance-lab/gpt-oss-120b/h100).
    "prefill_oss": (34_491 / 2, 13_500, 11_900),
    # Of DECODE_OSS under 32 answers, and from there on. Slow: after vllm #29708 it was 1,686 for 8 and 8,684
    # for 128 (vllm #30326), .87 and .68 of those before.
    "few": (1.0, 1.0, 0.87),
    "many": (1.0, 1.0, 0.75),  # (vllm #30326)
    # Share of the bandwidth at which others write (assumption).
    "decode": (0.85, 0.7, 0.5),
    # Seconds of a step in which they write, at least: Qwen3-0.6B writes 414 tokens/s alone on an H20, where
    # its weights could be read eight times as often (SGLang, qwen.readthedocs.io, speed_benchmark). Half and
    # twice of it are assumptions.
    "step": (0.0012, 0.0024, 0.0048),
    # GB/s a GPU that an all-gather reaches on 8 H100 (NOTES 10.8: 1.3 to 1.6 s for 2 x 233 GB).
    "nvlink": (400, 350, 250),
    # GB/s between a GPU and the host (assumption: PCIe 4.0 x 16, 32 on paper).
    "pcie": (28, 20, 12),
    # GB/s of host memory that Adam's step on the CPU reaches (assumption).
    "host": (100, 50, 25),
    # A server's step takes this many times as long for each engine that is busy beside it, one on the other:
    # slices ** busy. 1: they run beside each other, which needs CUDA's MPS. 2: CUDA gives the processes of a
    # GPU time slices, and a step over 8 GPUs waits for the slowest (simulated: 2.0, 4.0, 8.8, 16.5 times as
    # long beside 1 to 4 busy engines, NOTES 7.13). Between them is an assumption. On a single GPU it is 2:
    # both read memory.
    "slices": (1.0, 1.5, 2.0),
    # Core-seconds a transition: half an hour for all on one core (NOTES 2.8, on two shared cores). Other
    # cores are the range (assumption).
    "preparing": (0.03, 0.045, 0.07),
    # Of the host, for each GPU (assumption).
    "cores": (24, 12, 6),
    # Seconds for new weights to reach the engine (assumption).
    "sync": (2.0, 5.0, 15.0),
    # Turns of a try of WebRL, of up to 30 (assumption; slow: all tries take all).
    "try_turns": (8, 15, 30),
    # Seconds from an action until its real page is read: the site, and BrowserGym's wait of .5 (assumption;
    # with 16 browsers at once on one machine 14.8, mll-lab-nu/VAGEN #104).
    "real_step": (1.5, 3.0, 14.8),
    # Seconds of a new browser with its logins (assumption; in VAGEN #104 17.1).
    "real_reset": (5.0, 10.0, 17.1),
    # Share of the tries: between the SFT agent's .21 and WebRL's .42 (NOTES 12.2).
    "successes": (0.21, 0.3, 0.42),
    # MiniWoB++'s prompts beside those of the twelve tasks that were counted (assumption: others are longer.
    # The 39 of tiny/pages.jsonl.gz have 617 bytes a page, the twelve 447, which makes 1.1).
    "longer": (1.0, 1.2, 2.0),
    # Actions of a recording: 12,815 in 4,800 of twelve tasks, 29,772 in 7,890 of 39 (tiny/;
    # assumption between them).
    "actions": (2.67, 3.2, 3.77),
    # Recordings of a task: from recipe.RECORD's --per-task to its --most (assumption: how many need more).
    "recordings": (100, 115, 150),
    # Seconds of a step on a MiniWoB++ page, many side by side: 38 to 75 a second with DOM events, 13 with a
    # mouse; and of a reset (NOTES 11.10, two cores).
    "page_step": (1 / 75, 1 / 38, 1 / 13),
    "page_reset": (0.03, 0.05, 0.07),  # (NOTES 11.10)
    # Turns of a try of MiniWoB++, of up to 10. A recorded success has 2.3 (NOTES 2.9; assumption; slow: all
    # tries take all).
    "turns": (2.3, 5, 10),
    # Share of its longest answer that an untrained agent writes (assumption; slow: all of it).
    "rambles": (0.2, 0.5, 1.0),
    # Seconds of a vLLM until it answers, without reading its weights (assumption, as in node/compare.py).
    "starting": (60, 120, 300),
    # Seconds until the teacher has said of a goal whether it can be done (assumption); a rank asks one after
    # the other (rivals/curriculum.py).
    "teacher": (1.0, 3.0, 10.0),
}
FAST, LIKELY, SLOW = (SimpleNamespace(**{name: ends[k] for name, ends in FIGURES.items()}) for k in range(3))


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


def total(stages: Sequence[Stage], name: str = "total", why: str = "") -> Stage:
    add = lambda field: sum(getattr(stage, field) for stage in stages)
    return Stage(name, add("tokens"), add("seconds"), why, add("low"), add("high"))


def ranged(stages: Callable[[SimpleNamespace], list[Stage]]) -> list[Stage]:
    """The stages of LIKELY, with seconds from FAST to SLOW."""
    return [replace(likely, low=fast.seconds, high=slow.seconds)
            for fast, likely, slow in zip(*map(stages, (FAST, LIKELY, SLOW)))]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---- lengths -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pages:
    """What recorded pages have, in tokens. `page`: mean of what the agent reads in a turn; the world model
    and the judge read these shares of it. `inside`, `between`: deltas, as shares of `page`."""

    page: float = PAGE
    spread: float = SPREAD
    world: float = 1.0
    judge: float = 2.0
    answer: float = ANSWER
    verdict: float = ANSWER
    reason: float = 0.0
    """0: as the figure of that name."""
    inside: tuple[float, ...] = INSIDE
    between: tuple[float, ...] = BETWEEN
    rows: float = ROWS
    """Steps that the agent is cloned from."""
    transitions: float = TRANSITIONS
    recorded: float = 0.0
    """Trajectories that are recorded first."""


def pages_of(file: str, f=LIKELY) -> Pages:
    """MiniWoB++'s where the explorer recorded the file (.gz), else NNetNav's."""
    if not str(file).endswith(".gz"):
        return Pages()
    tries = len(TASKS) * f.recordings
    return Pages(MINIWOB_PAGE * f.longer, MINIWOB_SPREAD, MINIWOB_WORLD, MINIWOB_JUDGE, MINIWOB_ANSWER,
                 MINIWOB_VERDICT, MINIWOB_REASON, MINIWOB_DELTAS, MINIWOB_DELTAS,
                 rows=tries * WON, transitions=tries * f.actions, recorded=tries)


def delta_tokens(limit: float = math.inf, f=LIKELY, pages: Pages = Pages()) -> float:
    """Mean tokens of the world model's answer: a reason, and a delta of at most `limit`."""
    cut = lambda shares: mean([min(limit, share * pages.page) for share in shares])
    reason = pages.reason or f.reason
    return reason + (1 - f.navigation) * cut(pages.inside) + f.navigation * cut(pages.between)


def answer_tokens(config: dream.Config, pages: Pages = Pages()) -> float:
    """The same of a world model that may write whole pages."""
    if config.world_model_writes == "page":
        return min(config.world_model_tokens, pages.world * pages.page)
    return delta_tokens(config.world_model_tokens, pages=pages)


def page_tokens(rng: random.Random, pages: Pages = Pages()) -> float:
    return pages.page * rng.lognormvariate(-pages.spread**2 / 2, pages.spread)  # its mean is pages.page


Dream = tuple[float, list[float]]  # tokens of its pages, and of the world model's answers


def draw(config: recipe.Train, f, rng: random.Random) -> tuple[list[Dream], list[list[float]]]:
    """A batch: the dreams, and the lengths of the turns of every trajectory, experts too. All pages of a
    group are as long as the page it starts on. A page that does not fit the agent drops its dreams."""
    d, dreams, learned, pages = config.dreaming, [], [], pages_of(config.trajectories, f)
    for _ in range(d.tasks):
        page = page_tokens(rng, pages)
        fits = page <= config.context - d.max_new_tokens
        for _ in range(d.group):
            if rng.random() < d.expert_fraction * d.demonstrated:  # a window of 1 to `horizon` steps
                learned += [[page + pages.answer] * rng.randint(1, d.horizon)] * fits
                continue
            turns = next((k for k in range(1, d.horizon) if rng.random() < f.stops), d.horizon)
            kinds = [pages.between if rng.random() < f.navigation else pages.inside for _ in range(turns)]
            if fits:
                answers = [(pages.reason or f.reason) + page * rng.choice(shares) for shares in kinds]
                if d.world_model_writes == "page":
                    answers = [pages.world * page] * turns
                dreams.append((page, [min(d.world_model_tokens, answer) for answer in answers]))
                learned.append([page + pages.answer] * turns)
    return dreams, learned


def learning(rows: float, target: float, context: int, config: finetune.FineTune,
             ranks: int, pages: Pages = Pages(), share: float = 1.0) -> tuple[float, float, float]:
    """Tokens that a fine-tuning on so many rows learns, those that a rank learns or waits for, and its
    microbatches. `target` tokens are learned behind each page, or `share` of it."""
    rng = random.Random(0)
    lengths = [int(share * page_tokens(rng, pages) + target) for _ in range(SAMPLE)]
    lengths = [length for length in lengths if length <= context]
    steps = finetune.schedule(lengths, config)
    costs = [[sum(lengths[i] for i in batch) for batch in step] for step in steps]
    whole, most = sum(map(sum, costs)), sum(distributed.slowest(step, ranks) for step in costs)
    each = sum(math.ceil(len(step) / ranks) for step in costs)
    return rows / SAMPLE * whole, rows / SAMPLE * most, rows / SAMPLE * each


# ---- rates -------------------------------------------------------------------------------------------------


def train_rate(model: Model, card: Card, lora: bool, f=LIKELY) -> float:
    """Tokens/s a GPU, forward and backward with recomputation, without the head's float32 (see head)."""
    if lora and model.experts:  # frozen weights have no gradient: 2 FLOP a weight and token, three times
        return f.train_oss * card.flops * 1e12 / (6 * model.active)
    rate = f.train_8b * 8.03e9 / model.parameters * card.flops / CARDS["H100-80GB"].flops
    return rate / FROZEN if lora else rate


def head(model: Model, card: Card, lora: bool, tokens: float, f=LIKELY) -> float:
    """Seconds that the float32 head takes a GPU, over so many target tokens: forward, again, and backward to
    the hidden states and, unless it is frozen, to its weights."""
    flops = 2 * model.config.vocab_size * model.config.hidden_size * (3 if lora else 4)
    return tokens * flops / (f.head * card.float32 * 1e12)


def prefill_rate(model: Model, card: Card, f=LIKELY) -> float:
    """Tokens/s a GPU that are read."""
    if model.experts:
        return f.prefill_oss * 5.75e9 / model.active * card.flops / CARDS["H100-80GB"].flops
    return f.prefill * card.flops * 1e12 / (2 * model.parameters)


def decode_rate(model: Model, card: Card, tp: int, at_once: float, context: float, f=LIKELY) -> float:
    """Tokens/s of one server (all its GPUs together) that writes `at_once` answers."""
    if model.experts:  # straight in the logarithms between the measured points, and beyond the last
        k = max(1, sum(n < at_once for n, _ in DECODE_OSS[:-1]))
        (a, rate_a), (b, rate_b) = ((n, rate * (f.few if n < 32 else f.many))
                                    for n, rate in DECODE_OSS[k - 1 : k + 1])
        slope = math.log(rate_b / rate_a) / math.log(b / a)
        # Measured alike on H100 and H200: latency. A slower memory counts, and fewer GPUs in proportion.
        slower = min(1.0, card.bandwidth / CARDS["H100-80GB"].bandwidth)
        return rate_a * (at_once / a) ** slope * slower * tp / 8
    read = model.served(tp) + at_once * model.kv(context, tp)  # GB a step
    return at_once / max(f.step, read / (f.decode * card.bandwidth * 1000))


@dataclass(frozen=True)
class Speed:
    """Of a model that answers many at once. `read`: tokens/s of prompts, before anything is written (a step
    of vLLM that reads 8,192 tokens takes as long as some twenty that only write). `write(n)`: tokens/s of n
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


# GB a GPU (NOTES 9.11, all inferred there).
ENGINE_EXTRA = 2.0  # activations of a prefill and CUDA graphs of the in-process engine
SERVER_EXTRA = 4.0  # the same, and a context and NCCL of its own, over several GPUs
SERVER_ALONE_EXTRA = 2.5  # on one GPU, with at most 3B: no NCCL, and smaller activations (NOTES 9.13)


@dataclass(frozen=True)
class Row:
    """What takes GPU memory, GB in each phase."""

    who: str
    dreaming: float
    update: float
    why: str


@dataclass(frozen=True)
class Sampler:
    """vLLM of `model` over `tp` GPUs, with `kv` GB of cache on each (inf: on another machine). A prompt with
    its answer has `mean` tokens, and at most `context`. `most`: answers at once."""

    name: str
    model: Model
    tp: int
    kv: float
    mean: float
    context: int
    most: int

    @property
    def extra(self) -> float:
        """GB that are neither weights nor cache."""
        if self.name == "policy engine":
            return ENGINE_EXTRA
        return SERVER_EXTRA if self.tp > 1 or self.model.parameters > 4e9 else SERVER_ALONE_EXTRA

    @property
    def places(self) -> float:
        """Sequences of the mean length that have cache at once."""
        return self.kv / self.model.kv(self.mean, self.tp)

    def rows(self) -> list[Row]:
        kind = f"{self.model.name}, {'MXFP4' if self.model.experts else 'bf16'}, TP {self.tp}"
        place = f"place for {self.places:.0f} x {self.mean:,.0f} tokens; longest needs "
        sizes = [("weights", self.model.served(self.tp), kind),
                 ("KV cache", self.kv, place + f"{self.model.kv(self.context, self.tp):.1f}"),
                 ("CUDA graphs", self.extra, "allowance")]
        return [Row(f"{self.name}: {part}", size, size, why) for part, size, why in sizes]

    def speed(self, card: Card, f) -> Speed:
        return Speed(
            prefill_rate(self.model, card, f) * self.tp,
            lambda n: decode_rate(self.model, card, self.tp, n, self.mean, f),
            max(1, min(self.most, self.places)))


def offloading(model: Model, ranks: int, scored: float, learned: float, steps: float, f=LIKELY) -> float:
    """Seconds that --offload adds: for each of `scored` microbatches a rank the float32 weights travel to the
    GPU once, for each of `learned` ones twice and the gradients back. Adam reads and writes 28 bytes a weight
    on the host. As if nothing overlapped."""
    weights = model.parameters / GB / ranks
    return weights * ((4 * scored + 12 * learned) / f.pcie + 28 * steps / f.host)


# ---- stages ------------------------------------------------------------------------------------------------


def dreaming(dreams: list[Dream], by: Sequence[Speed], ranks: int, slices: float, current: bool,
             pages: Pages = Pages()) -> tuple[float, float, float]:
    """Seconds in which the agent acts, the world model answers and the judge judges (`by`: their speeds), in
    the dream that ends last. `current`: a rank's own engine judges its dreams, else the last verdict is
    alone."""
    if not dreams:  # a context that hardly any page fits
        return 0.0, 0.0, 0.0
    count, each = len(dreams), len(dreams) / ranks
    read = mean([page * len(answers) for page, answers in dreams])
    written = [sum(answers) for _, answers in dreams]
    turns = [pages.answer * len(answers) for _, answers in dreams]
    acts = by[0].seconds(each, read, mean(turns), max(turns))
    imagines = by[1].seconds(count, pages.world * read, mean(written), max(written))
    judges = by[2].seconds(each if current else 1, pages.judge * mean([page for page, _ in dreams]),
                           pages.verdict, pages.verdict)
    busy = acts / (acts + imagines)
    # The mean of slices ** m, where each of the ranks is busy with this chance; an engine has one server.
    return acts * slices, imagines * (1 + (slices - 1) * busy) ** ranks, judges


def dream_step(f, config: recipe.Train, agent: Model, card: Card, ranks: int,
               by: Sequence[Speed]) -> list[Stage]:
    """One update of train.py, part by part: means of BATCHES batches. `by`: see dreaming."""
    slices = 1.0 if config.answers_elsewhere else 2.0 if ranks == 1 else f.slices
    pages = pages_of(config.trajectories, f)
    rng, batches = random.Random(0), []  # of each batch the sums that are unpacked below
    for _ in range(BATCHES):
        dreams, rows = draw(config, f, rng)
        rng.shuffle(rows)
        costs = []  # of each minibatch those of its microbatches
        for k in range(config.minibatches):
            row = [length for row in rows[k :: config.minibatches] for length in row]
            costs.append([sum(row[i] for i in batch) for batch in lm.microbatches(row, config.tokens)])
        batches.append([*dreaming(dreams, by, ranks, slices, config.dreaming.judge == "current", pages),
                        sum(page for page, _ in dreams), sum(len(answers) for _, answers in dreams),
                        sum(page * len(answers) for page, answers in dreams),
                        sum(sum(answers) for _, answers in dreams), len(dreams),
                        sum(map(sum, costs)), sum(distributed.slowest(cost, ranks) for cost in costs),
                        sum(math.ceil(len(cost) / ranks) for cost in costs)])
    (acts, imagines, judges, starts, turns, read, written, count,
     learned, most, rounds) = map(mean, zip(*batches))
    scorings = 2 - 1 / config.minibatches  # old log-probs of all, new ones of all but the first minibatch
    passes = 1 + FORWARD * scorings
    update = most * passes / train_rate(agent, card, False, f)
    update += head(agent, card, False, most * pages.answer / (pages.page + pages.answer) * passes, f)
    why = f"{passes:.2f} passes; slowest rank {most * ranks / (learned or 1):.2f} x the mean"
    if config.offload:
        slower = offloading(agent, ranks, rounds * scorings, rounds, config.minibatches, f)
        update, why = update + slower, f"{passes:.2f} passes; {slower:,.0f} s of it to offload"
    return [Stage("the agent acts", read + turns * pages.answer, acts, "in the dream that ends last"),
            Stage("the world model answers", pages.world * read + written, imagines,
                  f"there; {written / (turns or 1):,.0f} tokens each"),
            Stage("the agent judges", pages.judge * starts + count * pages.verdict, judges,
                  "there; two pages"),
            Stage("update", learned, update, why), Stage("weights to the engine", 0, f.sync, "assumption")]


def preparing(f, ranks: int, pages: Pages = Pages()) -> Stage:
    """All transitions aligned, diffed and tokenised, by MOST_WORKERS of the node's cores. (A short page takes
    as long as a long one here: the safe side.)"""
    cores = min(MOST_WORKERS, f.cores * ranks)
    tokens = pages.transitions * pages.world * pages.page
    return Stage("prepare the examples", tokens, pages.transitions * f.preparing / cores,
                 f"{f.preparing * 1000:.0f} ms a transition, {cores} cores")


def annotation(f, world: Model, card: Card, ranks: int) -> Stage:
    """r for every recorded transition, by the untrained world model, 64 at a time (node.annotate's
    workers)."""
    read, tp = PAGE + delta_tokens(f=f), world.tensor_parallel(ranks)
    seconds = TRANSITIONS * read / (prefill_rate(world, card, f) * ranks)
    seconds += TRANSITIONS * f.annotation / decode_rate(world, card, tp, 64, read, f)
    return Stage("annotate the transitions", TRANSITIONS * (read + f.annotation), seconds,
                 f"{f.annotation} tokens written on each; 64 at once")


def fine_tuning(f, name: str, model: Model, config: recipe.WorldModelSFT | recipe.PolicySFT, card: Card,
                ranks: int, rows: float, target: float, lora: bool = False, offload: bool = False,
                pages: Pages = Pages(), share: float = 1.0) -> Stage:
    """The arithmetic of the slowest rank of each step. With LoRA over several ranks, a layer's bf16 weights
    travel twice for each microbatch; the rates of full training have them in. `share`: see learning."""
    tokens, most, each = learning(rows, target, config.context, config.sft, ranks, pages, share)
    rate = train_rate(model, card, lora, f)
    parts = {"head": head(model, card, lora, most * target / (share * pages.page + target), f)}
    if lora and ranks > 1:
        parts["weights"] = each * 2 * 2 * model.parameters / GB * (ranks - 1) / ranks / f.nvlink
    if offload:
        steps = math.ceil(each * ranks / config.sft.microbatches)
        parts["to offload"] = offloading(model, ranks, 0, each, steps, f)
    why = ", ".join(f"{part} {seconds / 3600:.1f} h" for part, seconds in parts.items())
    return Stage(name, tokens, most / rate + sum(parts.values()), f"{rate:,.0f}/s a GPU; {why}")


def around(f, config: recipe.Train, engine: Speed) -> list[Stage]:
    """What an evening on recorded pages has beside its trainings: the recording, looks at the real web, the
    evaluation of TRIED_MODELS agents, and vLLM's starts. `engine`: of who acts."""
    pages, d = pages_of(config.trajectories, f), config.dreaming

    def played(tries: float, turns: float, written: float) -> float:
        """Seconds of so many tries, AT_ONCE of them side by side."""
        rounds = math.ceil(tries / AT_ONCE)
        acting = engine.seconds(AT_ONCE, pages.page, written, written)
        return rounds * turns * acting + tries * (f.page_reset + turns * f.page_step)

    looks = -(-config.updates // config.evaluate_every) + 1 if config.evaluate_every else 0
    seen = looks * len(TASKS) * len(data.seeds_to_look_at(config.evaluate_seeds))
    tries, both = len(TASKS) * TRIED_SEEDS, pages.page + pages.answer
    untrained = played(tries, f.turns, max(pages.answer, f.rambles * d.max_new_tokens))
    trained = (TRIED_MODELS - 1) * played(tries, f.turns, pages.answer)
    starts = 3 + TRIED_MODELS  # a run's engine and servers; an engine for each that is evaluated
    return [Stage("record pages", 0, pages.recorded * (f.page_reset + f.actions * f.page_step),
                  f"{len(TASKS)} tasks, {pages.recorded:,.0f} trajectories; no GPU"),
            Stage("looks at the real web", seen * f.turns * both, played(seen, f.turns, pages.answer),
                  f"{looks} looks, {seen / (looks or 1):,.0f} tries each"),
            Stage("evaluation", TRIED_MODELS * tries * f.turns * both, untrained + trained,
                  f"{TRIED_MODELS} models, {tries:,} tries each"),
            Stage("vLLM starts", 0, starts * f.starting, f"{starts} times")]


def webrl_phase(f, n: int, config: recipe.Train, agent: Model, card: Card, ranks: int, engine: Speed,
                judge: Speed, browsers: int) -> list[Stage]:
    """Phase n of rivals/webrl.py (`config`: its own), one part after the other, as in the code. The buffer
    grows from phase to phase; all of it is within the perplexities' window (the safe side). `browsers`: of a
    rank."""
    tries = math.ceil(config.goals / (ranks * browsers))  # of each browser, one after the other
    new = config.goals * (turns := min(f.try_turns, config.dreaming.horizon))
    buffer = n * f.successes * new if config.replay else 0.0
    old, bred, both = min(config.replay * new, buffer), config.breed * config.goals, PAGE + ANSWER
    steps = max(2, math.ceil((new + old) / config.batch))
    batch = finetune.FineTune(tokens=config.tokens,
                              microbatches=math.ceil(config.batch * both / config.tokens))
    tokens, most, rounds = learning(1, ANSWER, config.context, batch, ranks)  # of a turn
    each = most / train_rate(agent, card, False, f) + head(agent, card, False, most * ANSWER / both, f)

    def trainer(turns: float, forwards: float, backward: int = 0) -> float:
        """Seconds of so many forward passes, and one with backward, over so many turns."""
        slower = offloading(agent, ranks, rounds * turns * forwards, rounds * turns * backward,
                            steps * backward, f) if config.offload else 0.0
        return turns * (backward + FORWARD * forwards) * each + slower

    acting = browsers * (PAGE / engine.read + ANSWER / engine.write(browsers))
    asked = config.goals * bool(bred)  # which goals can be done, of as many as the next phase may have
    return [Stage("the agent acts", new * both, tries * turns * acting, f"{turns:g} turns a try"),
            Stage("the sites answer", 0, tries * (f.real_reset + turns * f.real_step),
                  f"{f.real_step:g} s a step; {ranks * browsers} browsers, {tries} tries each"),
            Stage("the reward model answers", config.goals * (PAGE + VERDICT),
                  judge.seconds(config.goals, PAGE, VERDICT, VERDICT), "a page each"),
            Stage("perplexities", buffer * tokens, trainer(buffer, 1), f"of the buffer; {buffer:,.0f} turns"),
            Stage("states for the critic", (new + old + bred) * tokens, trainer(new + old + bred, 1),
                  f"and of bred goals; {new + old:,.0f} + {bred:,}"),
            Stage("the teacher answers", asked * PAGE, math.ceil(asked / ranks) * f.teacher,
                  "its server is elsewhere, not in this plan"),
            Stage("a pass of the actor", (new + old) * tokens, trainer(new + old, 2 - 1 / steps, 1),
                  f"log-probs, too; {new:,.0f} + {old:,.0f} replayed"),
            Stage("weights to the engine", 0, f.sync, "assumption")]
