"""How long: tokens and hours of each stage of a recipe, by arithmetic on figures that others measured.

Each figure has its source; one without is called an assumption. What nobody has measured is a range: LIKELY,
and its ends SLOW and FAST. Every stage is reckoned three times, with all figures at one end at once.

Units: GB is 1e9 bytes; tokens are the model's; a rate is tokens/s.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import lm
import policy
import train
import world_model
from node.sizes import CARDS, GB, Card, Model

# NNetNav's data (NOTES 2.7). nnetnav-live's train.jsonl is 3.19 GB in 48,333 rows
# (huggingface.co/datasets/stanfordnlp/nnetnav-live/tree/main). A row of 66 kB holds the page twice
# ("messages" and "prompt"): 33 kB, at an assumed 3.7 bytes a token.
ROWS = 48_333
TRANSITIONS = 43_316  # rows with a successor (NOTES 2.7): what is annotated and what the world model learns
PAGE = 9_000
ANSWER = 300  # tokens of thought and action (NOTES 10.7: 1,500 in 5 turns)

FORWARD = 0.25  # of forward, recomputation and backward (1 + 1 + 2)
FROZEN = 0.75  # of the same, where weights have no gradient (1 + 1 + 1)


@dataclass(frozen=True)
class Figures:
    """What the hours rest on. On another card than the source's, training and prefill scale with its bf16
    flops, decoding with its bandwidth."""

    # ---- lengths ----
    inside: tuple[float, ...] = (.002, .003, .007, .020, .040, .081, .136, .196, .343, .489)
    """A delta as a share of the next page, where the route stays: the middles of tenths of 245 transitions,
    by random clicks in four applications of WebArena-Infinity, ids aligned (LOG.md)."""
    between: tuple[float, ...] = (.165, .388, .503, .549, .576, .631, .693, .732, .789, .861)
    """The same where it changes, 99 transitions (LOG.md). The medians are .06 and .61; others saw .03 and .71
    there."""
    navigation: float = 0.2
    """Share of the actions that lead to another page. With .2 the mean delta is .23 of the next page, as over
    98 transitions of two real sites (NOTES 2.7), whose median, .06, would say less."""
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
    sync: float = 5.0
    """Seconds for new weights to reach the engine (assumption)."""


LIKELY = Figures()
SLOW = replace(
    LIKELY, navigation=0.4, reason=200, annotation=1_000,
    train_8b=5_762 * 0.6,  # transformers' layers instead of torchtitan's (assumption)
    train_oss=0.08,  # torchtitan's own first run on 8 B200: 8.1 % (torchtitan #4604)
    head=0.5, prefill=0.3, prefill_oss=11_900, decode=0.5,
    # After vllm #29708: 1,686 for 8 and 8,684 for 128 (vllm #30326), .87 and .68 of those before.
    decode_oss=tuple((n, rate * (0.87 if n < 32 else 0.75)) for n, rate in LIKELY.decode_oss),
    nvlink=250, pcie=12, host=25, sync=15.0)
FAST = replace(
    LIKELY, navigation=0.1, reason=50, annotation=300, train_8b=5_762,
    train_oss=0.23,  # 231 TFLOP/s on 64 H100, with DeepEP (docs.nvidia.com/nemo/automodel, performance)
    head=0.9, prefill=0.55, decode=0.85,
    prefill_oss=34_491 / 2,  # over 2 H100, 4000/200 (docs.gpustack.ai, performance-lab/gpt-oss-120b/h100)
    nvlink=400, pcie=28, host=100, sync=2.0)


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


def writing(model: Model, card: Card, tp: int, writers: float, tokens: float, context: float,
            places: float, figures: Figures = LIKELY) -> float:
    """Seconds until `writers` answers of so many tokens are written, when `places` of them have cache at
    once."""
    at_once = max(1.0, min(writers, places))
    rate = decode_rate(model, card, tp, at_once, context, figures)
    return math.ceil(writers / at_once) * tokens * at_once / rate


def offloading(model: Model, ranks: int, scored: float, learned: float, steps: int,
               figures: Figures = LIKELY) -> float:
    """Seconds that --offload adds: for each of `scored` microbatches a rank the float32 weights travel to the
    GPU once, for each of `learned` ones twice and the gradients back. Adam reads and writes 28 bytes a weight
    on the host. As if nothing overlapped."""
    weights = model.parameters / GB / ranks
    return weights * ((4 * scored + 12 * learned) / figures.pcie + 28 * steps / figures.host)


def spread(model: Model, server: lm.ServerConfig, ranks: int) -> int:
    """GPUs that share a server's model: as many as it is given, where there are so many."""
    return model.tensor_parallel(min(ranks, server.tensor_parallel))


# ---- stages ------------------------------------------------------------------------------------------------


def dream_step(config: train.Config, agent: Model, world: Model, card: Card, ranks: int,
               places: dict[str, float]) -> list[Stage]:
    """One update of train.py, part by part. `places` of each sampler; a server elsewhere has place for
    all."""
    return ranged(lambda figures: _dream_step(config, agent, world, card, ranks, places, figures))


def _dream_step(config: train.Config, agent: Model, world: Model, card: Card, ranks: int,
                places: dict[str, float], figures: Figures) -> list[Stage]:
    d, rows = config.dreaming, config.dreaming.tasks * config.dreaming.group
    dreams = round(rows * (1 - d.expert_fraction * d.demonstrated))  # an expert is learned from, not dreamed
    turns, answer = dreams * d.horizon, delta_tokens(d.world_model_tokens, figures)

    # Every turn waits for its longest answers: twice the mean of the agent's; of the world model's, the
    # navigations.
    at_once = -(-dreams // ranks)
    acting = turns * PAGE / (prefill_rate(agent, card, figures) * ranks)
    acting += d.horizon * writing(agent, card, 1, at_once, 2 * ANSWER, PAGE, places["policy engine"], figures)
    tp, at_once = spread(world, config.world_model_server, ranks), max(1.0, figures.navigation * dreams)
    longest = min(PAGE * figures.between[-1], d.world_model_tokens)
    imagining = turns * PAGE / (prefill_rate(world, card, figures) * ranks)
    imagining += d.horizon * writing(world, card, tp, at_once, longest, 1.5 * PAGE,
                                     places.get("world model server", dreams), figures)
    judging = dreams * 2 * PAGE / (prefill_rate(agent, card, figures) * ranks)  # once a dream
    if d.judge == "current":  # each rank's engine judges its own
        judging += writing(agent, card, 1, -(-dreams // ranks), ANSWER, 2 * PAGE, places["policy engine"],
                           figures)
    else:
        judging += writing(agent, card, spread(agent, config.judge_server, ranks), dreams, ANSWER, 2 * PAGE,
                           places.get("judge server", dreams), figures)
    # Experts are windows of 1 to `horizon` steps (data.expert_windows).
    learned = (turns + (rows - dreams) * (1 + d.horizon) / 2) * (PAGE + ANSWER)
    rate = train_rate(agent, card, False, figures)
    scorings = 2 - 1 / config.minibatches  # old log-probs of all, new ones of all but the first minibatch
    passes, updating = 1 + FORWARD * scorings, f"{rate:,.0f} tokens/s a GPU; less if groups drop out"
    seconds = learned * passes / (rate * ranks)
    seconds += head(agent, card, False, learned * ANSWER / (PAGE + ANSWER) * passes / ranks, figures)
    if config.offload:
        each = learned / (PAGE + ANSWER) / max(1, config.tokens // (PAGE + ANSWER)) / ranks
        slower = offloading(agent, ranks, each * scorings, each, config.minibatches, figures)
        seconds, updating = seconds + slower, f"{rate:,.0f} tokens/s a GPU; {slower:,.0f} s of it to offload"
    return [Stage("the agent acts", turns * (PAGE + ANSWER), acting,
                  f"{dreams} dreams x {d.horizon} turns; no two share a prefix"),
            Stage("the world model answers", turns * (PAGE + answer), imagining,
                  f"{answer:,.0f} tokens an answer; a turn waits for its longest"),
            Stage("the agent judges", dreams * (2 * PAGE + ANSWER), judging, "two pages each"),
            Stage("update", learned, seconds, f"{passes:.2f} passes, {updating}"),
            Stage("weights to the engine", 0, figures.sync, "assumption")]


def annotation(world: Model, card: Card, ranks: int) -> Stage:
    """r for every recorded transition, by the untrained world model, 64 at a time (node.annotate's
    workers)."""
    def stage(figures: Figures) -> list[Stage]:
        read, tp = PAGE + delta_tokens(10**9, figures), world.tensor_parallel(ranks)
        seconds = TRANSITIONS * read / (prefill_rate(world, card, figures) * ranks)
        seconds += TRANSITIONS * figures.annotation / decode_rate(world, card, tp, 64, read, figures)
        return [Stage("annotate the transitions", TRANSITIONS * (read + figures.annotation), seconds,
                      f"{TRANSITIONS:,} x {read:,.0f}, {figures.annotation} written on each; 64 at once")]

    return ranged(stage)[0]


def world_model_sft(world: Model, config: world_model.Config, card: Card, ranks: int) -> Stage:
    """Its fine-tuning: the arithmetic, and between the ranks twice a layer's bf16 weights for each
    microbatch."""
    def stage(figures: Figures) -> list[Stage]:
        written = delta_tokens(10**9, figures)
        length, lora = min(config.context, PAGE + written), bool(config.lora_rank)
        rate, many = train_rate(world, card, lora, figures), TRANSITIONS * config.sft.epochs
        microbatches = many / max(1, config.sft.tokens // length) / ranks
        gathering = microbatches * 2 * 2 * world.parameters / GB * (ranks - 1) / ranks / figures.nvlink
        scoring = head(world, card, lora, many * written / ranks, figures)
        return [Stage("fine-tune the world model", many * length,
                      gathering + scoring + many * length / (rate * ranks),
                      f"{rate:,.0f} tokens/s a GPU; {gathering / 3600:.1f} h to gather weights, "
                      f"{scoring / 3600:.1f} h float32 head")]

    return ranged(stage)[0]


def policy_sft(agent: Model, config: policy.Config, card: Card, ranks: int) -> Stage:
    """Its cloning, of all rows. It learns no judging: that is tiny/lessons.py's, of the laptop's recipe
    only."""
    def stage(figures: Figures) -> list[Stage]:
        many = ROWS * config.sft.epochs
        tokens = many * (PAGE + ANSWER)
        rate, why = train_rate(agent, card, False, figures), "one epoch; not needed with the published agents"
        seconds = tokens / (rate * ranks) + head(agent, card, False, many * ANSWER / ranks, figures)
        if "single" in config.out.split("/"):  # nobody has published an agent of its size
            why = f"{rate:,.0f} tokens/s a GPU"
        if config.offload:
            each = many / max(1, config.sft.tokens // (PAGE + ANSWER)) / ranks
            steps = math.ceil(each * ranks / config.sft.microbatches)
            slower = offloading(agent, ranks, 0, each, steps, figures)
            seconds, why = seconds + slower, f"{why}; {slower / 3600:.1f} h of it to offload"
        return [Stage("fine-tune the agent", tokens, seconds, why)]

    return ranged(stage)[0]
