"""Sizes of cards and models: what a data sheet and a config.json tell.

    model = read_model("openai/gpt-oss-120b")
    model.served(tp=8), model.kv(9000, tp=8)          # GB of each GPU: weights, and the cache of a sequence

Units: GB is 1e9 bytes; tokens are the model's.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

GB = 1e9


@dataclass(frozen=True)
class Card:
    """memory: GB that CUDA gives to programs, less than nvidia-smi shows (NOTES 9.11). From NVIDIA's data
    sheets: flops (dense bf16, TFLOP/s), bandwidth (TB/s), float32 (TFLOP/s without tensor cores)."""

    memory: float
    flops: float
    bandwidth: float
    float32: float = 67.0


CARDS = {
    "H100-80GB": Card(84.9, 989, 3.35, 67),
    "H200-141GB": Card(150.1, 989, 4.8, 67),
    "A100-80GB": Card(85.1, 312, 2.04, 19.5),
    "A100-40GB": Card(42.3, 312, 1.56, 19.5),
    "L40S-48GB": Card(47.7, 362, 0.86, 91.6),
    "RTX4090-24GB": Card(25.3, 165, 1.01, 82.6),
    "RTX3090-24GB": Card(25.4, 71, 0.94, 35.6),
}


def read_card(name: str) -> Card:
    if name not in CARDS:
        raise ValueError(f"card {name!r} is not known; known are {', '.join(CARDS)} "
                         "(or add a line to node/sizes.py)")
    return CARDS[name]


CONFIGS = Path(__file__).parent.parent / "configs"
PUBLISHED = {  # a folder of configs/ -> the names under which recipes speak of that model
    "Llama-3.1-8B-Instruct": ("stanfordnlp/llama8b-nnetnav-live", "stanfordnlp/llama8b-nnetnav-wa",
                              "meta-llama/Llama-3.1-8B-Instruct", "runs/paper/sft"),
    "gpt-oss-120b": ("openai/gpt-oss-120b", "runs/paper/world_model"),
    "WebWorld-8B": ("Qwen/WebWorld-8B",),  # Qwen3-8B's config: its card names it as the base
    "Llama-3.2-3B-Instruct": ("meta-llama/Llama-3.2-3B-Instruct", "runs/single/llama_world_model"),
    "Llama-3.2-1B-Instruct": ("meta-llama/Llama-3.2-1B-Instruct", "runs/single/llama_sft",
                              "runs/single/llama_world_model_1b"),
    "Qwen3-1.7B": ("Qwen/Qwen3-1.7B", "runs/single/world_model"),
    "Qwen3-0.6B": ("Qwen/Qwen3-0.6B", "runs/single/sft"),
}


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")  # the ends of their names


@dataclass(frozen=True)
class Model:
    """What a config.json tells of a model: numbers of weights, and bytes of cache."""

    name: str
    config: PreTrainedConfig
    parameters: int
    experts: int
    """Of the parameters: in MXFP4 when the model is served."""
    active: int
    """Of the parameters: those that work on each token."""
    kv_token: int
    """Bytes for each token, of the layers that see everything."""
    kv_sequence: int
    """Bytes for each sequence, of the layers with a window."""

    def served(self, tp: int) -> float:
        """GB of weights a GPU. MXFP4 is 4.25 bits a weight. Its kernels pad: they want an intermediate size
        in steps of 64 a GPU and a hidden size in steps of 256 (vLLM, fused_moe/oracle/mxfp4.py)."""
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
    """From the folder's own config.json, or for a published name from configs/. Raises ValueError for any
    other."""
    known = {name: CONFIGS / path for path, names in PUBLISHED.items() for name in names}
    path = Path(folder) if (Path(folder) / "config.json").exists() else known.get(str(folder))
    if path is None:
        raise ValueError(f"{folder} holds no config.json and is no model whose size is known here; "
                         f"give a folder, or one of: {', '.join(known)}")
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        weights = {name: p.numel() for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    total = sum(weights.values())
    experts = sum(n for name, n in weights.items() if name.endswith(EXPERTS))
    used = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_local_experts", 1)
    head = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    layer = 2 * 2 * config.num_key_value_heads * head  # bytes a token: K and V in bf16
    windows = sum(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", 0) or 0
    return Model(path.name, config, total, experts, active=int(total - experts * (1 - used)),
                 kv_token=layer * (config.num_hidden_layers - windows), kv_sequence=layer * windows * window)
