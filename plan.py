"""Will it fit, and how long: what a run takes of a GPU, a host, a disk and a day, before any of them is rented.

    python train.py --plan           python world_model.py --plan           on any laptop: no GPU, no weights, no download

The trainer is simulated. Fake ranks, fake tensors, and the very code of the run (the model class of transformers, distributed.shard, the
chunked head of lm.py) under torch's FSDPMemTracker: every allocation is counted, none is made. Everything else is arithmetic on the model's
config.json and on figures that others measured; each constant below has its source, and those without one are called an assumption.

How the simulation stays short. A decoder stack is the same layer again and again, and each moment of an update grows linearly with their
number: so 4 and 6 layers are simulated and the line through them is followed to 32. Two lines, because the peak may lie where the backward
pass begins (all the checkpoints of all layers are there) or where it ends (all gradients are); the larger counts. With
the same attention 32 layers gave 26.71 GB and the line 26.72 (16k tokens, 8 ranks), and took five times as long.

Where this is not the truth: CPU kernels stand for CUDA's, whose workspaces, the context and fragmentation are an allowance; a page has the mean
length here, and none in the data has. Memory errs to the safe side, hours are good to a factor of two.

Units: GB is 1e9 bytes; tokens are the model's.
"""

import copy
import math
import types
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

import distributed
import lm

GB = 1e9


@dataclass(frozen=True)
class Card:
    """memory: GB that CUDA reports. flops: dense bf16, TFLOP/s. bandwidth: TB/s. All from NVIDIA's data sheets."""

    memory: float
    flops: float
    bandwidth: float


CARDS = {"H100-80GB": Card(85.5, 989, 3.35),  # 81,559 MiB (systems.md, 1.6)
         "H200-141GB": Card(150.1, 989, 4.8), "A100-80GB": Card(85.9, 312, 2.04), "A100-40GB": Card(42.5, 312, 1.56),
         "L40S-48GB": Card(48.3, 362, 0.86), "RTX4090-24GB": Card(25.4, 165, 1.01), "RTX3090-24GB": Card(25.4, 71, 0.94)}

# ---- the figures that the arithmetic rests on -------------------------------------------------------------------------------

# Memory, GB a GPU (systems.md, 1.6, all inferred there).
TRAINER_EXTRA = 3.0  # CUDA context, NCCL, fragmentation
ENGINE_EXTRA = 2.0  # activations of a prefill and CUDA graphs of the in-process engine
SERVER_EXTRA = 4.0  # the same, and a context and NCCL of its own
PROCESS = 6.0  # host memory of one Python process with CUDA and vLLM (assumption)

# Pages. NNetNav-live's train.jsonl is 3.19 GB in 48,333 rows (huggingface.co/datasets/stanfordnlp/nnetnav-live/tree/main): 66 kB a row, which
# holds the page twice ("messages" and "prompt"): 33 kB, at an assumed 3.7 bytes a token of accessibility tree.
ROWS = 48_333
PAGE = 9_000
DATA = 3.55 + 1.97  # GB: nnetnav-live and nnetnav-wa
ANSWER = 300  # tokens of thought and action (systems.md, section 6: 1,500 in 5 turns)
REASON = 200  # what the annotator writes, in tokens (assumption: two sentences and some thinking at "Reasoning: low")
EDIT = 300  # a delta that changes a page in place (assumption)
NAVIGATION = 0.4  # of the actions lead to another page, which the delta then writes out (assumption)
ANNOTATION = 500  # tokens that the annotator thinks and writes (assumption; its limit is 4,096)

# Speed. Where the card is another than the source's: training and prefill scale with its flops, decoding with its bandwidth.
TRAIN_8B = 5_762 * 0.85  # tokens/s a GPU. torchtitan, Llama-3.1-8B on 8 H100, sequences of 8k, selective checkpointing; 0.85: ours is full
FORWARD = 0.25  # of forward, recomputation and backward (1 + 1 + 2)
PREFILL_MFU = 0.4  # of the card's flops (assumption)
OSS_PREFILL = 34_491 / 2  # tokens/s a GPU. gpt-oss-120b, 2 H100, prompts of 4000 and answers of 200 (docs.gpustack.ai, performance-lab)
OSS_DECODE = {8: 1_948, 128: 12_781}  # tokens/s at so many sequences at once. vLLM, TP 8, 8 H200 (vllm #30326)
DECODE_EFFICIENCY = 0.7  # of the bandwidth, elsewhere (assumption)
OSS_TRAIN_MFU = 0.15  # grouped matrix products of 4 of 128 experts, flex attention (assumption)
NVLINK = 350  # GB/s a GPU that an all-gather reaches on 8 H100 (systems.md, 2.2: 1.3 to 1.6 s for 2 x 233 GB)
SYNC = 5.0  # seconds for new weights to reach the engine (assumption)


# ---- models ----------------------------------------------------------------------------------------------------------------

CONFIGS = Path(__file__).parent / "configs"
PUBLISHED = {  # the folder a config may name -> the config.json that ships with this repository
    "stanfordnlp/llama8b-nnetnav-live": "Llama-3.1-8B-Instruct", "stanfordnlp/llama8b-nnetnav-wa": "Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B-Instruct", "runs/paper/sft": "Llama-3.1-8B-Instruct",
    "openai/gpt-oss-120b": "gpt-oss-120b", "runs/paper/world_model": "gpt-oss-120b",
    "meta-llama/Llama-3.2-3B-Instruct": "Llama-3.2-3B-Instruct", "runs/single/world_model": "Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct": "Llama-3.2-1B-Instruct", "runs/single/sft": "Llama-3.2-1B-Instruct"}


@dataclass(frozen=True)
class Model:
    """What a config.json tells. `experts` of the `parameters` are in MXFP4 when served, `active` work on each token; `kv_token` and
    `kv_sequence`: bytes of cache a token, and a sequence (of layers with a window)."""

    name: str
    config: PreTrainedConfig
    parameters: int
    experts: int
    active: int
    kv_token: int
    kv_sequence: int

    def served(self, tp: int) -> float:
        """GB of weights a GPU. MXFP4 is 4.25 bits a weight; its kernels want an intermediate size in steps of 64 a GPU and a hidden size in
        steps of 256 (vLLM, fused_moe/oracle/mxfp4.py), and pad."""
        rest = 2 * (self.parameters - self.experts) / tp
        if not self.experts:
            return rest / GB
        inner, hidden = self.config.intermediate_size, self.config.hidden_size
        padding = math.ceil(inner / tp / 64) * 64 * tp / inner * math.ceil(hidden / 256) * 256 / hidden
        return (rest + self.experts * 4.25 / 8 / tp * padding) / GB

    @property
    def folder(self) -> float:
        """GB on disk, as it is served."""
        return (2 * (self.parameters - self.experts) + self.experts * 4.25 / 8) / GB

    def tensor_parallel(self, ranks: int) -> int:
        """The most of `ranks` GPUs that the heads can be spread over."""
        return max(n for n in range(1, ranks + 1) if self.config.num_attention_heads % n == 0)

    def kv(self, tokens: float, tp: int) -> float:
        """GB of cache a GPU for one sequence."""
        return (self.kv_token * tokens + self.kv_sequence) / min(tp, self.config.num_key_value_heads) / GB


def read_model(folder: str) -> Model:
    """From the folder's own config.json, or for a published name from configs/. Raises ValueError for any other."""
    path = Path(folder) if (Path(folder) / "config.json").exists() else CONFIGS / PUBLISHED.get(str(folder), "?")
    if not (path / "config.json").exists():
        raise ValueError(f"{folder} holds no config.json and is no model whose size is known here; give a folder, or one of: {', '.join(PUBLISHED)}")
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        weights = {name: p.numel() for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    experts = sum(n for name, n in weights.items() if name.endswith(("experts.gate_up_proj", "experts.down_proj")))
    used = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_local_experts", 1)
    layer = 2 * 2 * config.num_key_value_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)  # K and V, bf16
    windows = sum(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or [])
    return Model(path.name, config, sum(weights.values()), experts, int(sum(weights.values()) - experts * (1 - used)),
                 layer * (config.num_hidden_layers - windows), layer * windows * (getattr(config, "sliding_window", 0) or 0))


def read_card(name: str) -> Card:
    if name not in CARDS:
        raise ValueError(f"card {name!r} is not known; known are {', '.join(CARDS)} (or add a line to plan.CARDS)")
    return CARDS[name]


# ---- the trainer, simulated ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainer:
    """GB a GPU of one rank's update. `persistent`: weights and optimizer; `gradients`: whole; `begins[T]` and `ends[T]`: the peaks of the
    upper half of a backward pass over T tokens (and all before it), and of the lower half; `step`: of the optimizer."""

    persistent: float
    gradients: float
    step: float
    begins: dict[int, float]
    ends: dict[int, float]
    offload: bool = False

    def peak(self, tokens: float) -> float:
        """At any number of tokens: on the line through the nearest two that were simulated."""
        host = self.persistent if self.offload else 0.0
        grown = self.gradients if self.offload else 0.0
        at = lambda stage: _line(stage, tokens)
        return max(at(self.begins) - host, at(self.ends) - host - grown, 0.0 if self.offload else self.step)

    @property
    def resident(self) -> float:
        """What stays on the GPU while the agent dreams."""
        return 0.0 if self.offload else self.persistent


def _line(points: dict[int, float], x: float) -> float:
    """Through the two points nearest to x (one point: flat).

    >>> _line({2: 10.0, 4: 20.0, 8: 60.0}, 6)
    40.0
    """
    (x0, y0), (x1, y1) = (sorted(sorted(points.items(), key=lambda p: abs(p[0] - x))[:2]) * 2)[:2]
    return y0 if x0 == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def simulate(model: Model, ranks: int, tokens: Sequence[int], lora: int = 0, offload: bool = False, scored: float = 1.0, depths: tuple[int, int] = (4, 6)) -> Trainer:
    """One rank's update over each of `tokens`. `lora`: rank of adapters on q, k, v, o over a frozen bf16 base; 0 trains all, in float32.
    `scored`: the share of positions that the head sees; 1 is the upper bound. Leaves no process group and no fake mode behind.

    Offloading is arithmetic on the simulation: weights, optimizer and finished gradients are then in host memory.
    """
    if dist.is_initialized():
        raise ValueError("a plan is made in a process of its own: start it without torchrun")
    layers = model.config.num_hidden_layers
    if layers <= depths[1]:
        return Trainer(*_simulate(model, layers, ranks, tokens, lora, scored), offload=offload)
    low, high = (_simulate(model, depth, ranks, tokens, lora, scored) for depth in depths)
    at = lambda a, b: {T: at(a[T], b[T]) for T in a} if isinstance(a, dict) else _line(dict(zip(depths, (a, b))), layers)
    return Trainer(*(at(a, b) for a, b in zip(low, high)), offload=offload)


@contextmanager
def _fake_ranks(ranks: int):
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def _simulate(model: Model, layers: int, ranks: int, tokens: Sequence[int], lora: int, scored: float) -> tuple[float, float, float, dict, dict]:
    """(persistent, gradients, step, begins, ends) of Trainer, for the model with so many layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config.__dict__.pop("quantization_config", None)  # what is trained is the dequantised model
    with _fake_ranks(ranks) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if lora else torch.float32, attn_implementation="planned")
        if lora:
            _add_adapters(net, lora)
        distributed.shard(net, mesh)
        net.train()
        net.forward = types.MethodType(_logps, net)  # the tracker sees forward only, not what lm.LM registers beside it
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        for parameter in trained:  # a step before the first: Adam's moments are there from the start
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        begins, ends, step, gradients = {}, {}, 0.0, 0.0
        tracker = FSDPMemTracker(net, optimizer)
        tracker.track_inputs(())
        with tracker:
            persistent = _total(tracker, "current")
            for T in tokens:
                tracker.reset_mod_stats()
                _forget_peak(tracker)

                def low(_grad, T=T):  # the gradient that leaves the third layer: two layers are still to come
                    begins[T] = _total(tracker)
                    _forget_peak(tracker)

                handle = net.model.layers[1].register_forward_hook(lambda _, __, hidden: None if T in begins else (hidden.register_hook(low), None)[1])
                net(torch.zeros(1, T, dtype=torch.long), max(1, int(scored * T))).sum().backward()
                handle.remove()
                ends[T], gradients = _total(tracker), _total(tracker, "current") - persistent
                _forget_peak(tracker)
                optimizer.step()
                step = _total(tracker)
                optimizer.zero_grad()
        return persistent, gradients, step, begins, ends


def _total(tracker: FSDPMemTracker, kind: str = "peak") -> float:
    return sum(device["Total"] for device in tracker.get_tracker_snapshot(kind).values()) / GB


def _forget_peak(tracker: FSDPMemTracker) -> None:
    tracker._peak_mem.clear()  # the tracker has no way to begin a peak anew; the next operation sets it


def _logps(net, ids: torch.Tensor, scored: int) -> torch.Tensor:
    """lm._token_logps, whose choice of positions depends on data that fake tensors have not."""
    hidden = net.model(input_ids=ids, use_cache=False).last_hidden_state[0, -scored:]  # (N, D)
    pieces = zip(hidden.split(lm.HEAD_TOKENS), ids[0, -scored:].split(lm.HEAD_TOKENS))
    return torch.cat([checkpoint(lm._head_logps, net.lm_head, h, y, 1.0, use_reentrant=False) for h, y in pieces])


def _attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Memory of a fused kernel, which never holds the (T, T) scores: flash-attn, varlen_attn, flex_attention."""
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2), None


AttentionInterface.register("planned", _attention)
AttentionMaskInterface.register("planned", lambda *args, **kwargs: None)


def _add_adapters(net, rank: int) -> None:
    """As gptoss.load_sharded does. peft moves what it adds to where the base is, by a swap of tensors that fake ones refuse."""
    import peft

    with mock.patch.object(torch.nn.Module, "to", lambda module, *args, **kwargs: module):
        peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]), net, low_cpu_mem_usage=True)
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


# ---- a GPU, phase by phase -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One taker of GPU memory, GB in each phase."""

    who: str
    dreaming: float
    update: float
    why: str


@dataclass(frozen=True)
class Stage:
    """One stage of the recipe: tokens that it handles and how long it takes on all ranks."""

    name: str
    tokens: float
    seconds: float
    why: str


@dataclass(frozen=True)
class Change:
    """A way to fit: the headroom (GB, in the tightest phase) that it alone would leave, and what it costs."""

    what: str
    headroom: float
    cost: str


@dataclass(frozen=True)
class Plan:
    """All numbers of a printed plan. `longest` is the peak of the longest sequence allowed, `fits` the tokens of the longest that has room."""

    title: str
    card: str
    ranks: int
    rows: list[Row]
    longest: float
    context: int
    fits: int
    changes: list[Change]
    host: dict[str, float]
    disk: dict[str, float]
    stages: list[Stage]
    notes: list[str]

    @property
    def dreaming(self) -> float:
        return sum(row.dreaming for row in self.rows)

    @property
    def update(self) -> float:
        return sum(row.update for row in self.rows)

    @property
    def headroom(self) -> float:
        """GB left in the tightest phase, at config.tokens a microbatch."""
        return CARDS[self.card].memory - max(self.dreaming, self.update)

    @property
    def headroom_longest(self) -> float:
        """GB left while one sequence of the whole context is learned from, alone in its microbatch."""
        return CARDS[self.card].memory - max(self.dreaming, self.longest)


def kv_cache(name: str, model: Model, tp: int, context: int, kv_cache_gb: float) -> float:
    """GB of cache a GPU, as the config says. Raises ValueError when one sequence of the whole context has no place: vLLM does not start then."""
    if kv_cache_gb < (need := model.kv(context, tp)):
        raise ValueError(f"--{name}.kv-cache-gb {kv_cache_gb} holds no sequence of {context:,} tokens ({need:.1f} GB), and vLLM would not start: raise it, or lower --context")
    return kv_cache_gb


def plan_train(config, card: str = "H100-80GB", ranks: int = 8) -> Plan:
    """The plan of train.py's Config. Raises ValueError for an unknown card or model, and for the laptop's sampler."""
    if config.sampler != "vllm":
        raise ValueError("the plan is for GPUs and vLLM (sampler vllm); the laptop's recipe needs neither: 1 GB of memory, a quarter of an hour")
    c, limits, dreams = read_card(card), config.dreaming, config.dreaming.tasks * config.dreaming.group
    agent, world = read_model(config.policy), read_model(config.world_model)
    trainer = simulate(agent, ranks, sorted({config.tokens, config.context}), offload=config.offload)
    extra = trainer.peak(config.tokens) - trainer.resident
    rows = [Row("trainer: weights, Adam", trainer.resident, trainer.resident, f"simulated, {_ranks(ranks)}, float32" + (", in host memory" if config.offload else "")),
            Row(f"trainer: a microbatch of {config.tokens:,}", 0.0, extra, "simulated: gathered layers, activations, head, gradients"),
            Row("trainer: CUDA, NCCL, fragments", TRAINER_EXTRA, TRAINER_EXTRA, "allowance")]
    turn = PAGE + ANSWER
    kv = kv_cache("policy-engine", agent, 1, config.context, config.policy_engine.kv_cache_gb)
    slots = {"agent": kv / agent.kv(turn, 1)}  # sequences of the mean length that have a place at once
    rows += [Row("policy engine: weights", agent.served(1), agent.served(1), "bf16, one engine on each rank"),
             Row("policy engine: KV cache", kv, kv, f"place for {slots['agent']:.0f} x {turn:,} tokens; the longest sequence needs {agent.kv(config.context, 1):.1f}"),
             Row("policy engine: graphs, workspace", ENGINE_EXTRA, ENGINE_EXTRA, "allowance")]
    servers = [("world model", world, config.world_model_urls, dreams, PAGE + _delta(limits.world_model_tokens))]
    servers += [("judge", agent, config.judge_urls, dreams, 2 * PAGE + ANSWER)] if limits.judge == "policy" else []
    for name, model, urls, _, mean in servers:
        if urls:
            continue
        tp = model.tensor_parallel(ranks)
        settings = config.world_model_server if name == "world model" else config.judge_server
        cache = kv_cache(f"{name.replace(' ', '-')}-server", model, tp, config.context, settings.kv_cache_gb)
        slots[name] = cache / model.kv(mean, tp)
        kind = "MXFP4" if model.experts else "bf16"
        rows += [Row(f"{name} server: weights", model.served(tp), model.served(tp), f"{model.name}, {kind}, TP {tp}"),
                 Row(f"{name} server: KV cache", cache, cache, f"place for {slots[name]:.0f} x {mean:,.0f} tokens"),
                 Row(f"{name} server: CUDA, graphs", SERVER_EXTRA, SERVER_EXTRA, "allowance")]
    others = sum(row.update for row in rows) - extra
    longest = others + trainer.peak(config.context) - trainer.resident
    room = c.memory - others + trainer.resident
    processes = ranks + sum(model.tensor_parallel(ranks) for _, model, urls, _, _ in servers if not urls)
    host = {f"{processes} processes with CUDA, {PROCESS:.0f} GB each": PROCESS * processes,
            "a checkpoint on its way to disk": 12 * agent.parameters / GB}
    host |= {"offloaded weights, gradients, Adam": 16 * agent.parameters / GB} if config.offload else {}
    disk = {"NNetNav's data": DATA, f"the agent ({agent.name}, bf16)": 2 * agent.parameters / GB,
            "the world model, as published": world.folder, "the same, fine-tuned and merged": world.folder,
            f"{config.keep_checkpoints + 1} checkpoints (float32, Adam)": (config.keep_checkpoints + 1) * 12 * agent.parameters / GB, "the trained agent": 2 * agent.parameters / GB}
    stages = dream_step(config, agent, world, c, ranks, slots)
    plan = Plan(f"{agent.name} dreams in {world.name}", card, ranks, rows, longest, config.context, _fitting(trainer, room, config.context), [], host, disk, stages, [])
    return replace(plan, changes=_train_changes(plan, config, trainer, agent, servers, kv))


def _ranks(count: int) -> str:
    return f"{count} ranks" if count > 1 else "1 rank"


def _fitting(trainer: Trainer, room: float, most: int) -> int:
    """The longest microbatch, in steps of 1,024 tokens, whose peak has `room` GB; 0: none."""
    return max((T for T in range(1024, most + 1024, 1024) if trainer.peak(T) <= room), default=0)


def _train_changes(plan: Plan, config, trainer: Trainer, agent: Model, servers, kv: float) -> list[Change]:
    """In the order in which to try them: what costs least first. Each is counted alone."""
    memory, need = CARDS[plan.card].memory, max(plan.update, plan.longest)
    after = lambda freed, dreaming=0.0: memory - max(need - freed, plan.dreaming - dreaming)
    changes = []
    if plan.fits and plan.fits < config.context:
        changes.append(Change(f"--context {plan.fits}" + (f" --tokens {plan.fits}" if plan.fits < config.tokens else ""), memory - max(plan.dreaming, need - trainer.peak(max(config.context, config.tokens)) + trainer.peak(plan.fits)),
                              "longer turns are not dreamed (counted as truncated)"))
    if not config.offload:
        off = replace(trainer, offload=True)
        longest = max(config.tokens, config.context)
        changes.append(Change("--offload", after(trainer.peak(longest) - off.peak(longest), trainer.resident), f"{16 * agent.parameters / GB:.0f} GB of host memory, and a slow optimizer step"))
    changes.append(Change("the policy engine asleep in updates", after(agent.served(1) + kv), "vLLM's sleep level 1: not wired here"))
    for name, model, urls, _, _ in servers:
        if not urls:
            tp = model.tensor_parallel(plan.ranks)
            freed = sum(row.update for row in plan.rows if row.who.startswith(f"{name} server"))
            changes.append(Change(f"--{name.replace(' ', '-')}-urls URL", after(freed, freed), f"another machine with {model.served(1) * 1.1:.0f} GB of GPU memory"))
            if name == "judge":
                changes.append(Change("--dreaming.judge current", after(freed, freed), "the judge learns along, and may learn to be fooled"))
    floor = kv - agent.kv(config.context, 1)
    if floor > 0:
        changes.append(Change(f"KV of the policy engine down to {agent.kv(config.context, 1):.1f} GB", after(floor, floor), "turns wait for a place"))
    return changes


# ---- hours -----------------------------------------------------------------------------------------------------------------


def _delta(limit: int) -> float:
    """Mean tokens of the world model's answer: a reason, and an edit or a whole page."""
    return REASON + NAVIGATION * min(PAGE, limit) + (1 - NAVIGATION) * EDIT


def train_rate(model: Model, card: Card, lora: bool) -> float:
    """Tokens/s a GPU, forward and backward with recomputation."""
    if lora and model.experts:  # frozen weights have no gradient of their own: 2 FLOP a weight and token, three times
        return OSS_TRAIN_MFU * card.flops * 1e12 / (6 * model.active)
    return TRAIN_8B * 8.03e9 / model.parameters * card.flops / CARDS["H100-80GB"].flops


def prefill_rate(model: Model, card: Card) -> float:
    if model.experts:
        return OSS_PREFILL * 5.75e9 / model.active * card.flops / CARDS["H100-80GB"].flops
    return PREFILL_MFU * card.flops * 1e12 / (2 * model.parameters)


def decode_rate(model: Model, card: Card, tp: int, at_once: float, context: float) -> float:
    """Tokens/s of one server (all its GPUs together) that writes `at_once` answers."""
    if model.experts:
        (a, ra), (b, rb) = OSS_DECODE.items()
        slope = math.log(rb / ra) / math.log(b / a)
        return ra * (at_once / a) ** slope * card.bandwidth / CARDS["H200-141GB"].bandwidth * tp / 8
    return at_once * DECODE_EFFICIENCY * card.bandwidth * 1000 / (model.served(tp) + at_once * model.kv(context, tp))


def writing(model: Model, card: Card, tp: int, writers: float, tokens: float, context: float, slots: float) -> float:
    """Seconds until `writers` answers of so many tokens are written, when `slots` of them have a place in the cache at once."""
    at_once = max(1.0, min(writers, slots))
    return math.ceil(writers / at_once) * tokens * at_once / decode_rate(model, card, tp, at_once, context)


def dream_step(config, agent: Model, world: Model, card: Card, ranks: int, slots: dict[str, float]) -> list[Stage]:
    """One update of train.py, part by part. `slots`: sequences that the agent, "world model" and "judge" have cache for (servers elsewhere: all)."""
    d, rows = config.dreaming, config.dreaming.tasks * config.dreaming.group
    dreams = round(rows * (1 - d.expert_fraction * d.demonstrated))  # what an expert stands for is learned from, and not dreamed
    turns, each = dreams * d.horizon, -(-dreams // ranks)
    tp, answer = world.tensor_parallel(ranks), _delta(d.world_model_tokens)
    # Every turn waits for its longest answers: twice the mean of the agent's; of the world model's, the navigations.
    acting = turns * PAGE / (prefill_rate(agent, card) * ranks) + d.horizon * writing(agent, card, 1, each, 2 * ANSWER, PAGE, slots["agent"])
    pages = max(1.0, NAVIGATION * dreams)
    imagining = turns * PAGE / (prefill_rate(world, card) * ranks) + d.horizon * writing(world, card, tp, pages, min(PAGE, d.world_model_tokens), 1.5 * PAGE, slots.get("world model", dreams))
    verdicts = writing(agent, card, agent.tensor_parallel(ranks), dreams, ANSWER, 2 * PAGE, slots.get("judge", dreams))  # once a dream, whenever it ends
    judging = dreams * 2 * PAGE / (prefill_rate(agent, card) * ranks) + verdicts
    passes = 1 + FORWARD * (2 - 1 / config.minibatches)  # old log-probs of all, new ones of all minibatches but the first
    learning = rows * d.horizon * (PAGE + ANSWER) * passes / (train_rate(agent, card, False) * ranks)
    return [Stage("the agent acts", turns * (PAGE + ANSWER), acting, f"{dreams} dreams x {d.horizon} turns; no two share a prefix"),
            Stage("the world model answers", turns * (PAGE + answer), imagining, f"{answer:,.0f} tokens an answer; a turn waits for its longest"),
            Stage("the agent judges", dreams * (2 * PAGE + ANSWER), judging, "two pages each"),
            Stage("update", rows * d.horizon * (PAGE + ANSWER), learning, f"{passes:.2f} passes, {train_rate(agent, card, False):,.0f} tokens/s a GPU; less if groups drop out"),
            Stage("weights to the engine", 0, SYNC, "assumption")]


def annotation(world: Model, card: Card, ranks: int) -> Stage:
    """r for every recorded step, by the untrained world model, 128 at a time."""
    read, tp = PAGE + _delta(10**9), world.tensor_parallel(ranks)
    seconds = ROWS * read / (prefill_rate(world, card) * ranks) + ROWS * ANNOTATION / decode_rate(world, card, tp, 128, read)
    return Stage("annotate the transitions", ROWS * (read + ANNOTATION), seconds, f"{ROWS:,} x {read:,.0f}, {ANNOTATION} written on each; 128 at once")


def world_model_sft(world: Model, config, card: Card, ranks: int, lora: bool) -> Stage:
    length = min(config.context, PAGE + _delta(10**9))
    tokens, microbatches = ROWS * length * config.sft.epochs, ROWS * config.sft.epochs / max(1, config.sft.tokens // length) / ranks
    gathering = microbatches * 2 * 2 * world.parameters / GB * (ranks - 1) / ranks / NVLINK
    computing = tokens / (train_rate(world, card, lora) * ranks)
    why = f"{train_rate(world, card, lora):,.0f} tokens/s a GPU; {gathering / 3600:.1f} h to gather weights"
    return Stage("fine-tune the world model", tokens, gathering + computing, why)


def policy_sft(agent: Model, card: Card, ranks: int) -> Stage:
    tokens = ROWS * (PAGE + ANSWER)
    return Stage("fine-tune the agent", tokens, tokens / (train_rate(agent, card, False) * ranks), "one epoch; not needed with the published agents")


# ---- the world model's plan ------------------------------------------------------------------------------------------------


def plan_world_model(config, card: str = "H100-80GB", ranks: int = 8, lora: int | None = None) -> Plan:
    """The plan of world_model.py's Config. `lora`: rank of the adapters, 0 trains everything; None: 8 for gpt-oss, else 0."""
    c, world = read_card(card), read_model(config.base)
    lora = (8 if world.experts else 0) if lora is None else lora
    trainer = simulate(world, ranks, sorted({config.sft.tokens, config.context}), lora=lora)
    extra = trainer.peak(config.sft.tokens) - trainer.resident
    kind = f"bf16, and adapters of rank {lora}" if lora else "float32, and Adam"
    rows = [Row("weights" + ("" if lora else ", Adam"), 0.0, trainer.resident, f"simulated, {_ranks(ranks)}, {kind}"),
            Row(f"a microbatch of {config.sft.tokens:,}", 0.0, extra, "simulated: gathered layers, activations, head"),
            Row("CUDA, NCCL, fragments", 0.0, TRAINER_EXTRA, "allowance")]
    longest = TRAINER_EXTRA + trainer.peak(config.context)
    room = c.memory - TRAINER_EXTRA
    states = 12 * sum(4 * 2 * lora * world.config.hidden_size for _ in range(world.config.num_hidden_layers)) if lora else 12 * world.parameters
    host = {f"{ranks} processes with CUDA, {PROCESS:.0f} GB each": PROCESS * ranks, "a checkpoint on its way to disk": states / GB}
    disk = {"NNetNav's data": DATA, "the world model, as published": world.folder, "checkpoints": 3 * states / GB, "the same, fine-tuned and merged": world.folder}
    fits = _fitting(trainer, room, config.context)
    changes = [Change(f"--context {fits}", room - trainer.peak(fits), "longer transitions are dropped and counted")] if fits and fits < config.context else []
    if not fits:
        changes.append(Change("more ranks, or a larger card", room - trainer.peak(1024), "one layer, gathered, and its shard do not fit"))
    stages = [annotation(world, c, ranks), world_model_sft(world, config, c, ranks, bool(lora))]
    notes = ["With flex_attention. Eager attention holds (T, T) scores: 54 GB at 2k tokens, 57 at 4k, and at 16k no card is enough."] if world.experts else []
    return Plan(f"fine-tuning {world.name}" + (" with LoRA" if lora else ""), card, ranks, rows, longest, config.context, fits, changes, host, disk, stages, notes)


# ---- the printed plan ------------------------------------------------------------------------------------------------------


def train_plan(config, card: str = "H100-80GB", ranks: int = 8) -> str:
    """What `python train.py --plan` prints."""
    plan = plan_train(config, card, ranks)
    c, agent, world = read_card(card), read_model(config.policy), read_model(config.world_model)
    step = sum(stage.seconds for stage in plan.stages)
    import world_model

    before = [annotation(world, c, ranks), world_model_sft(world, world_model.Config(), c, ranks, bool(world.experts)), policy_sft(agent, c, ranks)]
    run = Stage(f"{config.updates:,} updates of dreams", config.updates * sum(stage.tokens for stage in plan.stages), config.updates * step, f"{step:,.0f} s each")
    return "\n".join([*_memory(plan), "", *_storage(plan), "", *_table("One update", plan.stages, "s"), "", *_table("The recipe", [*before, run], "h"), "", *ASSUMPTIONS])


def world_model_plan(config, card: str = "H100-80GB", ranks: int = 8, lora: int | None = None) -> str:
    """What `python world_model.py --plan` prints."""
    plan = plan_world_model(config, card, ranks, lora)
    return "\n".join([*_memory(plan), "", *_storage(plan), "", *_table("Stages", plan.stages, "h"), "", *ASSUMPTIONS])


def _memory(plan: Plan) -> list[str]:
    memory, both = CARDS[plan.card].memory, any(row.dreaming for row in plan.rows)
    cell = lambda value: f"{value:10.1f}" if isinstance(value, float) and value else f"{value or '-':>10}"
    line = lambda who, dreaming, update, why="": f"  {who:36}{cell(dreaming) if both else ''}{cell(update)}   {why}".rstrip()
    lines = [f"{plan.title}: {plan.ranks} x {plan.card}", "", line("GB of each GPU", "dreaming", "update"),
             *(line(row.who, row.dreaming, row.update, row.why) for row in plan.rows), line("total", plan.dreaming, plan.update),
             line(f"free of {memory:.1f}", memory - plan.dreaming, memory - plan.update),
             line(f"free at a sequence of {plan.context:,}", " ", memory - plan.longest, "the longest that --context allows, alone in its microbatch"), ""]
    if plan.headroom >= 0 and plan.headroom_longest >= 0:
        return lines + ["It fits."] + plan.notes
    lines.append("IT DOES NOT FIT." if plan.headroom < 0 else f"IT DOES NOT ALWAYS FIT: a full microbatch does, but a sequence over {plan.fits:,} tokens runs out of memory.")
    lines += [f"  {'Change, first one first; each counted alone':44}{'then free':>10}   at the price of"]
    lines += [f"  {change.what:44}{change.headroom:10.1f}   {change.cost}" for change in plan.changes]
    if not any(change.headroom >= 0 for change in plan.changes):
        larger = [name for name, card in CARDS.items() if card.memory >= max(plan.dreaming, plan.update, plan.longest)]
        lines.append(f"  None is enough alone: put several together, or take more ranks or another card ({', '.join(larger) or 'none here is large enough'}).")
    return lines + plan.notes


def _storage(plan: Plan) -> list[str]:
    lines = []
    for title, parts in (("Host memory of the node, GB", plan.host), ("Disk, GB", plan.disk)):
        lines += [f"  {title:48}{sum(parts.values()):8,.0f}", *(f"    {what:46}{size:8,.1f}" for what, size in parts.items())]
    return lines


def _table(title: str, stages: Sequence[Stage], unit: str) -> list[str]:
    scale = {"s": 1, "h": 3600}[unit]
    lines = [f"  {title:32}{'M tokens':>10}{unit:>8}", *(f"    {s.name:30}{s.tokens / 1e6:10,.2f}{s.seconds / scale:8,.1f}   {s.why}".rstrip() for s in stages)]
    return lines + [f"    {'total':30}{sum(s.tokens for s in stages) / 1e6:10,.2f}{sum(s.seconds for s in stages) / scale:8,.1f}"]


ASSUMPTIONS = [f"Hours are good to a factor of two: pages of {PAGE:,} tokens (NNetNav's are 33 kB), {ANSWER} tokens a turn of the agent,",
               f"a new page after {NAVIGATION:.0%} of the actions. Every figure has its source in plan.py; none was measured on this card."]
