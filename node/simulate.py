"""The memory of a trainer, simulated on any laptop: no GPU, no weights, no download.

    config = AutoConfig.from_pretrained("configs/Llama-3.1-8B-Instruct")
    trainer = simulate(config, ranks=8, tokens=(8192, 16384))
    trainer.peak(12000)              # GB of each GPU in an update with microbatches of 12,000 tokens

Fake ranks, fake tensors, and the very code of the run (transformers' model class, distributed.shard, lm.py's
head in pieces) under torch's FSDPMemTracker. Every allocation is counted, none is made.

A decoder is the same layer again and again, and each moment of an update grows linearly with the number of
layers. So 4 and 6 layers are simulated, and the line through them is followed to 32. There are two lines,
because the peak may lie where the backward pass begins (the checkpoints of all layers are there) or where it
ends (all gradients are). The larger counts. With the same attention 32 layers gave 26.71 GB and the line
26.72 (16k tokens, 8 ranks), and the 32 layers took five times as long.

CPU kernels stand for CUDA's. CUDA's workspaces, its context and fragmentation are not in these figures.

GB is 1e9 bytes; T is the length of a sequence, N the number of scored tokens, D the width of the model.
"""

import copy
import types
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import peft
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

import distributed
import lm
from node.gptoss import Lora

DEPTHS = (4, 6)  # layers; with 3 and 4 the peak of 32k tokens lies elsewhere (54 GB for 36)


@dataclass(frozen=True)
class Trainer:
    """GB a GPU of one rank's update."""

    persistent: float
    """Weights and optimizer."""
    gradients: float
    """Of all weights."""
    step: float
    """Peak of the optimizer's step."""
    begins: dict[int, float]
    """{T: peak of the forward pass and the upper half of the backward pass over T tokens}."""
    ends: dict[int, float]
    """{T: peak of the lower half}."""
    offload: bool = False
    """Weights, optimizer and finished gradients are in host memory."""

    def peak(self, tokens: float) -> float:
        """Of an update over so many tokens: on the line through the nearest two that were simulated."""
        begins, ends = _line(self.begins, tokens), _line(self.ends, tokens)
        if self.offload:
            return max(begins - self.persistent, ends - self.persistent - self.gradients, 0.0)
        return max(begins, ends, self.step)

    @property
    def resident(self) -> float:
        """What stays on the GPU while the agent dreams."""
        return 0.0 if self.offload else self.persistent


def _line(points: dict[int, float], x: float) -> float:
    """Through the two points nearest to x (one point: flat).

    >>> _line({2: 10.0, 4: 20.0, 8: 60.0}, 6)
    40.0
    """
    nearest = sorted(sorted(points.items(), key=lambda point: abs(point[0] - x))[:2])
    (x0, y0), (x1, y1) = nearest[0], nearest[-1]
    return y0 if x0 == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def simulate(config: PreTrainedConfig, ranks: int, tokens: Sequence[int], lora: int = 0) -> Trainer:
    """One rank's update over each of `tokens`. `lora`: rank of adapters on q, k, v, o over a frozen bf16
    base; 0 trains all weights, in float32. Every position is scored: the upper bound. Leaves no process group
    and no fake mode behind.
    """
    if dist.is_initialized():
        raise ValueError("a plan is made in a process of its own: start it without torchrun")
    layers, begins, ends = config.num_hidden_layers, {}, {}
    depths = DEPTHS if layers > DEPTHS[-1] else (layers,)
    for T in tokens:
        seen = [moments(config, depth, ranks, T, lora) for depth in depths]
        persistent, gradients, step, begins[T], ends[T] = (
            _line(dict(zip(depths, moment)), layers) for moment in zip(*seen))
    return Trainer(persistent, gradients, step, begins, ends)


_seen: dict[tuple, tuple[float, ...]] = {}  # a plan asks for the same again and again


def moments(config: PreTrainedConfig, layers: int, ranks: int, T: int, lora: int) -> tuple[float, ...]:
    """GB of a Trainer's five moments, of the model cut to so many layers."""
    if (key := (config.to_json_string(), layers, ranks, T, lora)) not in _seen:
        with _fake_ranks(ranks) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
            _seen[key] = _measured(_network(config, layers, lora), mesh, T)
    return _seen[key]


def _measured(net, mesh: DeviceMesh, T: int) -> tuple[float, ...]:
    distributed.shard(net, mesh)
    net.train()
    net.forward = types.MethodType(_logps, net)  # the tracker sees forward only, not what lm.LM registers
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for parameter in trained:  # a step before the first: Adam's moments are there from the start
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tracker = FSDPMemTracker(net, optimizer)
    tracker.track_inputs(())
    with tracker:
        persistent = _total(tracker, "current")
        begins = _forward_and_upper_half(net, tracker, T)
        ends, gradients = _total(tracker), _total(tracker, "current") - persistent
        _forget_peak(tracker)
        optimizer.step()
        return persistent, gradients, _total(tracker), begins, ends


@contextmanager
def _fake_ranks(ranks: int):
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def _network(config: PreTrainedConfig, layers: int, lora: int):
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config.__dict__.pop("quantization_config", None)  # the dequantised model is trained
    dtype = torch.bfloat16 if lora else torch.float32
    net = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="simulated")
    if lora:
        # As in gptoss.load_sharded. peft moves what it adds to where the base is; fake tensors refuse such a
        # move.
        with mock.patch.object(torch.nn.Module, "to", lambda module, *args, **kwargs: module):
            peft.inject_adapter_in_model(Lora(lora, 2 * lora).config(), net, low_cpu_mem_usage=True)
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return net


def _forward_and_upper_half(net, tracker: FSDPMemTracker, T: int) -> float:
    """Forward and backward over T tokens. Returns the peak until two layers of the backward pass are left."""
    peaks = []

    def two_are_left(_gradient):  # it leaves the third layer
        peaks.append(_total(tracker))
        _forget_peak(tracker)

    def watch(_module, _inputs, hidden):
        if not peaks:  # the forward pass, and not its recomputation
            hidden.register_hook(two_are_left)

    handle = net.model.layers[1].register_forward_hook(watch)
    net(torch.zeros(1, T, dtype=torch.long)).sum().backward()
    handle.remove()
    return peaks[0]


def _total(tracker: FSDPMemTracker, kind: str = "peak") -> float:
    return sum(device["Total"] for device in tracker.get_tracker_snapshot(kind).values()) / 1e9


def _forget_peak(tracker: FSDPMemTracker) -> None:
    tracker._peak_mem.clear()  # the tracker has no way to begin a peak anew; the next operation sets it


def _logps(net, ids: torch.Tensor) -> torch.Tensor:
    """lm._token_logps of all positions. Its own choice of positions depends on data, which fake tensors
    lack."""
    hidden = net.model(input_ids=ids, use_cache=False).last_hidden_state[0]  # (N, D)
    pieces = []
    for h, y in zip(hidden.split(lm.HEAD_TOKENS), ids[0].split(lm.HEAD_TOKENS)):
        pieces.append(checkpoint(lm._head_logps, net.lm_head, h, y, 1.0, use_reentrant=False))
    return torch.cat(pieces)


def _attention(module, query, key, value, attention_mask, scaling=None, **_):
    """Memory of a kernel that never holds the (T, T) scores: flash-attn, varlen_attn, node/sinks.py."""
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling,
                                                           enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register("simulated", _attention)
AttentionMaskInterface.register("simulated", lambda *args, **kwargs: None)
