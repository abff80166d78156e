"""How long: tokens and hours of each stage of a recipe, by arithmetic on figures that others measured.

Each constant has its source; a constant without one is called an assumption. Every page has the mean length
here, and hardly a page of the data has it. Hours are good to a factor of two.

Units: GB is 1e9 bytes; tokens are the model's; a rate is tokens/s.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import lm
import policy
import train
import world_model
from node.sizes import CARDS, GB, Card, Model

# Pages (NOTES 2.7). NNetNav-live's train.jsonl is 3.19 GB in 48,333 rows
# (huggingface.co/datasets/stanfordnlp/nnetnav-live/tree/main). A row of 66 kB holds the page twice
# ("messages" and "prompt"): 33 kB, at an assumed 3.7 bytes a token.
ROWS = 48_333
PAGE = 9_000
ANSWER = 300  # tokens of thought and action (NOTES 10.7: 1,500 in 5 turns)
REASON = 200  # tokens of r (assumption: two sentences, and some thinking at "Reasoning: low")
EDIT = 300  # tokens of a delta that changes a page in place (assumption)
NAVIGATION = 0.4  # of the actions lead to another page, which the delta then writes out (assumption)
ANNOTATION = 500  # tokens that the annotator thinks and writes (assumption; its limit is 4,096)

# Speed (NOTES 10.6): tokens/s a GPU where nothing else is said. On another card than the source's, training
# and prefill scale with its flops, decoding with its bandwidth.
TRAIN_8B = 5_762 * 0.85  # torchtitan, Llama-3.1-8B on 8 H100, 8k, selective checkpointing; 0.85: ours is full
FORWARD = 0.25  # of forward, recomputation and backward (1 + 1 + 2)
PREFILL_MFU = 0.4  # of the card's flops (assumption)
OSS_PREFILL = 34_491 / 2  # gpt-oss-120b, 2 H100, prompts of 4000 and answers of 200 (docs.gpustack.ai)
OSS_DECODE = {8: 1_948, 128: 12_781}  # of 8 H200 together, with so many sequences at once (TP 8, vllm #30326)
DECODE_EFFICIENCY = 0.7  # of the bandwidth, elsewhere (assumption)
OSS_TRAIN_MFU = 0.15  # grouped matrix products of 4 of 128 experts, flex attention (assumption)
NVLINK = 350  # GB/s a GPU that an all-gather reaches on 8 H100 (NOTES 10.8: 1.3 to 1.6 s for 2 x 233 GB)
PCIE = 20  # GB/s between a GPU and the host (assumption: PCIe 4.0 x 16, 32 on paper)
HOST = 50  # GB/s of host memory that Adam's step on the CPU reaches (assumption)
SYNC = 5.0  # seconds for new weights to reach the engine (assumption)


@dataclass(frozen=True)
class Stage:
    """One stage of the recipe: tokens that it handles, and how long it takes on all ranks."""

    name: str
    tokens: float
    seconds: float
    why: str


def total(stages: Sequence[Stage]) -> Stage:
    return Stage("total", sum(stage.tokens for stage in stages), sum(stage.seconds for stage in stages), "")


def delta_tokens(limit: int) -> float:
    """Mean tokens of the world model's answer: a reason, and an edit or a whole page."""
    return REASON + NAVIGATION * min(PAGE, limit) + (1 - NAVIGATION) * EDIT


def train_rate(model: Model, card: Card, lora: bool) -> float:
    """Tokens/s a GPU, forward and backward with recomputation."""
    if lora and model.experts:  # frozen weights have no gradient: 2 FLOP a weight and token, three times
        return OSS_TRAIN_MFU * card.flops * 1e12 / (6 * model.active)
    return TRAIN_8B * 8.03e9 / model.parameters * card.flops / CARDS["H100-80GB"].flops


def prefill_rate(model: Model, card: Card) -> float:
    """Tokens/s a GPU that are read."""
    if model.experts:
        return OSS_PREFILL * 5.75e9 / model.active * card.flops / CARDS["H100-80GB"].flops
    return PREFILL_MFU * card.flops * 1e12 / (2 * model.parameters)


def decode_rate(model: Model, card: Card, tp: int, at_once: float, context: float) -> float:
    """Tokens/s of one server (all its GPUs together) that writes `at_once` answers."""
    if model.experts:  # through the two measured points, straight in the logarithms
        (a, rate_a), (b, rate_b) = OSS_DECODE.items()
        slope = math.log(rate_b / rate_a) / math.log(b / a)
        return rate_a * (at_once / a) ** slope * card.bandwidth / CARDS["H200-141GB"].bandwidth * tp / 8
    read = model.served(tp) + at_once * model.kv(context, tp)  # GB a step
    return at_once * DECODE_EFFICIENCY * card.bandwidth * 1000 / read


def writing(model: Model, card: Card, tp: int, writers: float, tokens: float, context: float,
            places: float) -> float:
    """Seconds until `writers` answers of so many tokens are written, when `places` of them have cache at
    once."""
    at_once = max(1.0, min(writers, places))
    return math.ceil(writers / at_once) * tokens * at_once / decode_rate(model, card, tp, at_once, context)


def offloading(model: Model, ranks: int, scored: float, learned: float, steps: int) -> float:
    """Seconds that --offload adds: for each of `scored` microbatches a rank the float32 weights travel to the
    GPU once, for each of `learned` ones twice and the gradients back. Adam reads and writes 28 bytes a weight
    on the host. As if nothing overlapped."""
    weights = model.parameters / GB / ranks
    return weights * ((4 * scored + 12 * learned) / PCIE + 28 * steps / HOST)


def spread(model: Model, server: lm.ServerConfig, ranks: int) -> int:
    """GPUs that share a server's model: as many as it is given, where there are so many."""
    return model.tensor_parallel(min(ranks, server.tensor_parallel))


def dream_step(config: train.Config, agent: Model, world: Model, card: Card, ranks: int,
               places: dict[str, float]) -> list[Stage]:
    """One update of train.py, part by part. `places` of each sampler; a server elsewhere has place for
    all."""
    d, rows = config.dreaming, config.dreaming.tasks * config.dreaming.group
    dreams = round(rows * (1 - d.expert_fraction * d.demonstrated))  # an expert is learned from, not dreamed
    turns, answer = dreams * d.horizon, delta_tokens(d.world_model_tokens)

    # Every turn waits for its longest answers: twice the mean of the agent's; of the world model's, the
    # navigations.
    at_once = -(-dreams // ranks)
    acting = turns * PAGE / (prefill_rate(agent, card) * ranks)
    acting += d.horizon * writing(agent, card, 1, at_once, 2 * ANSWER, PAGE, places["policy engine"])
    tp, at_once = spread(world, config.world_model_server, ranks), max(1.0, NAVIGATION * dreams)
    page = min(PAGE, d.world_model_tokens)
    imagining = turns * PAGE / (prefill_rate(world, card) * ranks)
    imagining += d.horizon * writing(world, card, tp, at_once, page, 1.5 * PAGE,
                                     places.get("world model server", dreams))
    judging = dreams * 2 * PAGE / (prefill_rate(agent, card) * ranks)  # once a dream, whenever it ends
    if d.judge == "current":  # each rank's engine judges its own
        judging += writing(agent, card, 1, -(-dreams // ranks), ANSWER, 2 * PAGE, places["policy engine"])
    else:
        judging += writing(agent, card, spread(agent, config.judge_server, ranks), dreams, ANSWER, 2 * PAGE,
                           places.get("judge server", dreams))
    rate, learned = train_rate(agent, card, False), rows * d.horizon * (PAGE + ANSWER)
    scorings = 2 - 1 / config.minibatches  # old log-probs of all, new ones of all but the first minibatch
    passes, updating = 1 + FORWARD * scorings, f"{rate:,.0f} tokens/s a GPU; less if groups drop out"
    seconds = learned * passes / (rate * ranks)
    if config.offload:
        each = rows * d.horizon / max(1, config.tokens // (PAGE + ANSWER)) / ranks
        slower = offloading(agent, ranks, each * scorings, each, config.minibatches)
        seconds, updating = seconds + slower, f"{rate:,.0f} tokens/s a GPU; {slower:,.0f} s of it to offload"
    return [Stage("the agent acts", turns * (PAGE + ANSWER), acting,
                  f"{dreams} dreams x {d.horizon} turns; no two share a prefix"),
            Stage("the world model answers", turns * (PAGE + answer), imagining,
                  f"{answer:,.0f} tokens an answer; a turn waits for its longest"),
            Stage("the agent judges", dreams * (2 * PAGE + ANSWER), judging, "two pages each"),
            Stage("update", learned, seconds, f"{passes:.2f} passes, {updating}"),
            Stage("weights to the engine", 0, SYNC, "assumption")]


def annotation(world: Model, card: Card, ranks: int) -> Stage:
    """r for every recorded step, by the untrained world model, 128 at a time."""
    read, tp = PAGE + delta_tokens(10**9), world.tensor_parallel(ranks)
    seconds = ROWS * read / (prefill_rate(world, card) * ranks)
    seconds += ROWS * ANNOTATION / decode_rate(world, card, tp, 128, read)
    return Stage("annotate the transitions", ROWS * (read + ANNOTATION), seconds,
                 f"{ROWS:,} x {read:,.0f}, {ANNOTATION} written on each; 128 at once")


def world_model_sft(world: Model, config: world_model.Config, card: Card, ranks: int) -> Stage:
    """Its fine-tuning: the arithmetic, and between the ranks twice a layer's bf16 weights for each
    microbatch."""
    length = min(config.context, PAGE + delta_tokens(10**9))
    rate = train_rate(world, card, bool(config.lora_rank))
    tokens = ROWS * length * config.sft.epochs
    microbatches = ROWS * config.sft.epochs / max(1, config.sft.tokens // length) / ranks
    gathering = microbatches * 2 * 2 * world.parameters / GB * (ranks - 1) / ranks / NVLINK
    return Stage("fine-tune the world model", tokens, gathering + tokens / (rate * ranks),
                 f"{rate:,.0f} tokens/s a GPU; {gathering / 3600:.1f} h to gather weights")


def policy_sft(agent: Model, config: policy.Config, card: Card, ranks: int) -> Stage:
    """Its cloning, of all rows."""
    tokens = ROWS * (PAGE + ANSWER) * config.sft.epochs
    rate, why = train_rate(agent, card, False), "one epoch; not needed with the published agents"
    seconds = tokens / (rate * ranks)
    if "single" in config.out.split("/"):  # nobody has published an agent of its size
        why = f"{rate:,.0f} tokens/s a GPU"
    if config.offload:
        each = ROWS * config.sft.epochs / max(1, config.sft.tokens // (PAGE + ANSWER)) / ranks
        slower = offloading(agent, ranks, 0, each, math.ceil(each * ranks / config.sft.microbatches))
        seconds, why = seconds + slower, f"{why}; {slower / 3600:.1f} h of it to offload"
    return Stage("fine-tune the agent", tokens, seconds, why)
