"""What only the 120B world model needs: talk (harmony), load for training, merge. engine.py serves the merged folder.

    W' = W + alpha/r B A            W (out, in) bf16 of an attention projection, A (r, in), B (out, r): LoRA, arXiv 2106.09685, Eq. 3

gpt-oss-120b is 117 billion weights, of which 115 are experts in MXFP4: blocks (E, out, in/32, 16) uint8, two 4-bit numbers a byte, and
scales (E, out, in/32) uint8, one power of two for 32 numbers; here E experts. It is served as it is (65 GB) and trained in bf16 (234 GB).

- Trained are adapters on q, k, v, o only. These are bf16 in the checkpoint, so that the merge is one rounding and the experts stay as they
  are, byte for byte. An adapter on the experts could be served merged only after rounding them to 4 bits again: 11 % off.
- Merged, because vLLM's LoRA kernels give NaN on Hopper for long prompts (vllm #48590), and a merged folder needs none (systems.md, 2.1).
- Each rank reads its own experts only, layer by layer: transformers' own loading would take 8 x 234 GB of host memory on one node.
- Attention sinks in training: the flash kernels for them have no backward, eager attention needs 64 T^2 numbers a layer. sink_attention()
  turns the sink into a key, and any kernel will do.

Where we differ from the authors' script: LoRA on "all linear" there; on q, k, v, o here, for the merge's sake.
"""

import json
import re
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import peft
import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask, create_sliding_window_causal_mask

import distributed
import lm

# ---- harmony: how gpt-oss is talked to -------------------------------------------------------------------------------------

# The format's own text (openai/harmony, docs/format.md). The date is fixed: today's would make every prompt differ from those trained on.
SYSTEM = """You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {date}

Reasoning: low

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
DATE = "2025-08-05"
ROLES = {"system": "developer", "user": "user"}  # what others call the system message is the developer's here
ANSWER = [("<|channel|>", "analysis"), ("<|message|>", None), ("<|end|>", ""), ("<|start|>", "assistant"),
          ("<|channel|>", "final"), ("<|message|>", None), ("<|return|>", "")]  # None: what the model says


def is_harmony(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its model is talked to in harmony: through the three functions below instead of lm's."""
    return "<|channel|>" in tokenizer.get_added_vocab()


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict], date: str = DATE) -> list[int]:
    """Token ids of a chat (roles system and user) up to `<|start|>assistant`. Contents are disarmed. Raises ValueError for another role.

    Rendered here and not by the checkpoint's template, which writes today's date.
    """
    text = f"<|start|>system<|message|>{SYSTEM.format(date=date)}<|end|>"
    for message in messages:
        if message["role"] not in ROLES:
            raise ValueError(f"harmony prompts here have roles {', '.join(ROLES)}; not {message['role']!r}")
        content = lm.disarm(tokenizer, message["content"])
        head = "# Instructions\n\n" if message["role"] == "system" else ""
        text += f"<|start|>{ROLES[message['role']]}<|message|>{head}{content}<|end|>"
    return tokenizer(text + "<|start|>assistant", add_special_tokens=False).input_ids


def completion_ids(tokenizer: PreTrainedTokenizerBase, reason: str, final: str) -> list[int]:
    """Token ids of an answer, `<|return|>` included: it ends the turn and is learned like any other token. Both texts are disarmed."""
    said = iter((reason, final))
    text = "".join(token + (lm.disarm(tokenizer, next(said)) if words is None else words) for token, words in ANSWER)
    return tokenizer(text, add_special_tokens=False).input_ids


def read(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, str]:
    """(reason, final) of sampled ids; the inverse of completion_ids. Raises ValueError on anything else: another channel, a tool call, a
    part missing, tokens after the end, no end."""
    names = {index: token for token, index in tokenizer.get_added_vocab().items()}
    parts: list[tuple[str, list[int]]] = [("", [])]
    for index in ids:
        if index in names:
            parts.append((names[index], []))
        else:
            parts[-1][1].append(index)
    said = [(token, tokenizer.decode(part, clean_up_tokenization_spaces=False)) for token, part in parts]
    fits = len(said) == len(ANSWER) + 1 and said[0] == ("", "")
    if not (fits and all(token == name and words in (None, text) for (token, words), (name, text) in zip(ANSWER, said[1:]))):
        shape = "".join(token + (text if len(text) < 20 else "...") for token, text in said)
        raise ValueError(f"not a harmony answer{'' if shape.endswith('<|return|>') else ' (cut off?)'}: {shape[:200]!r} instead of analysis, final, <|return|>")
    return said[2][1], said[6][1]


# ---- a folder of safetensors files -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: its file, dtype as safetensors writes it, shape, and its bytes in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def entries(folder: str | Path) -> dict[str, Entry]:
    """All tensors of a model's folder, by name, from the files' headers (8 bytes of length, then JSON) alone.

    Raises ValueError for a folder without a model, a file that is missing or cut off, a tensor that the index promises and no file holds.
    """
    folder = Path(folder)
    listed = folder / "model.safetensors.index.json"
    promised = json.loads(listed.read_text())["weight_map"] if listed.exists() else {}
    # Only what lies at the top: OpenAI's folder has the same weights twice more, in original/ and metal/.
    files = sorted({folder / name for name in promised.values()} or {folder / "model.safetensors"})
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no model (no config.json)")
    found = {}
    for file in files:
        size = file.stat().st_size if file.exists() else 0
        try:
            with open(file, "rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                if 8 + length > size:
                    raise ValueError("the header is longer than the file")
                header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            for name, at in header.items():
                start, end = (8 + length + offset for offset in at["data_offsets"])
                found[name] = Entry(file, at["dtype"], tuple(at["shape"]), start, end)
                if end > size:
                    raise ValueError(f"{name} ends at byte {end} of {size}")
        except (OSError, ValueError, struct.error) as error:
            raise ValueError(f"{file} is cut off or missing ({error}); download it again") from error
    if missing := sorted(set(promised) - set(found)):
        raise ValueError(f"{folder}: its index lists {len(missing)} tensors that no file holds, first {missing[0]}; download it again")
    return found


# ---- load for training -----------------------------------------------------------------------------------------------------

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Lora:
    """Adapters on q, k, v, o (facts.md, section 2: the authors' rank and alpha)."""

    rank: int = 8
    alpha: int = 16

    def config(self) -> peft.LoraConfig:
        return peft.LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=list(PROJECTIONS), lora_dropout=0.0, bias="none")


def training_attention(name: str, device: torch.device) -> str:
    """`name`, if gpt-oss can be trained with it on `device`. Raises ValueError with the reason for any other (systems.md, 2.2)."""
    if name in ("sinks", "eager"):  # eager is the reference; its memory grows with the square of the length
        return name
    if name == "flex_attention":
        if device.type != "cuda":
            raise ValueError("flex_attention has attention sinks on a GPU only; take sinks or eager")
        return name
    reason = "has no attention sinks" if name == "sdpa" else "has no backward through the attention sinks, or is not known to have one"
    raise ValueError(f"attention {name!r} {reason}; gpt-oss trains with sinks, eager or (GPU) flex_attention")


def sink_attention(module, query, key, value, attention_mask, scaling, s_aux, sliding_window=None, dropout=0.0, cu_seq_lens_q=None, **_):
    """Causal attention with a sink a head, in memory that grows with the length only: query (B, H, T, D), key and value (B, H_kv, T, D),
    s_aux (H,) -> (B, T, H, D), None. Of a packed row (B = 1, lm.pack) each sequence sees itself alone.

    A sink is a logit beside the scores, without a value. Here it is a key beside the keys: query' = (q, s/scaling), key' = (k, 0), and one
    more key (0, 1) with value 0, so that its score is s. Then torch's own kernels do the rest, and their backward is the right one.
    """
    assert attention_mask is None and dropout == 0 and (cu_seq_lens_q is None or query.shape[0] == 1)
    width, length = query.shape[-1], query.shape[2]
    sink = (s_aux / scaling).to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)
    query = F.pad(torch.cat([query, sink], -1), (0, 7))  # GPU kernels want widths in eights
    key, value = F.pad(key, (0, 8)), F.pad(value, (0, 8))
    bounds = [0, length] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    pieces = [_with_sink(*(x[:, :, start:end] for x in (query, key, value)), width, scaling, sliding_window) for start, end in zip(bounds, bounds[1:])]
    return torch.cat(pieces, 2)[..., :width].transpose(1, 2).contiguous(), None


def _with_sink(query, key, value, width: int, scaling: float, window: int | None) -> torch.Tensor:
    """One sequence of sink_attention (D is width + 8). A query of a sliding layer sees itself and the `window` - 1 keys before it."""
    length = query.shape[2]
    if window is None or length <= window:
        query, key, value = (F.pad(x, (0, 0, 1, 0)) for x in (query, key, value))  # the sink stands first, where all see it; a query too, dropped below
        key[:, :, 0, width] = 1.0
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)[:, :, 1:]
    # Blocks of `window` queries, each against the sink, the block before and its own: (B, H, T, D) -> (B * blocks, H, window, D)
    fill = -length % window
    query, key, value = (F.pad(x, (0, 0, 0, fill)).unflatten(2, (-1, window)).transpose(1, 2) for x in (query, key, value))  # (B, blocks, H, window, D)
    key, value = (torch.cat([F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1], x], 3) for x in (key, value))  # (B, blocks, H_kv, 2 window, D)
    groups = query.shape[2] // key.shape[2]
    key, value = (F.pad(x, (0, 0, 1, 0)).repeat_interleave(groups, 2) for x in (key, value))  # with a mask, the GPU's kernels want all heads
    key[..., 0, width] = 1.0
    back = torch.arange(window)[:, None] + window - torch.arange(2 * window)  # (window, 2 window): how far back each key lies
    sees = ((back >= 0) & (back < window)).expand(key.shape[1], -1, -1).clone()
    sees[0, :, :window] = False  # there is nothing before the first block
    sees = F.pad(sees, (1, 0), value=True)[None, :, None].expand(len(key), -1, 1, -1, -1).flatten(0, 1).to(query.device)
    out = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (query, key, value)), attn_mask=sees, scale=scaling)
    return out.unflatten(0, (-1, key.shape[1])).transpose(1, 2).flatten(2, 3)[:, :, :length]


AttentionInterface.register("sinks", sink_attention)
AttentionMaskInterface.register("sinks", lambda *args, **kwargs: None)


def _mask_packed(model, args, kwargs: dict):
    """What GptOssModel's forward forgets (transformers 5.19): it does not hand position_ids to the masks, as Llama's does, and the sequences
    of a packed row would see each other without a word. For eager and flex_attention, before every forward."""
    ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
    if positions is not None and kwargs.get("attention_mask") is None and kwargs.get("past_key_values") is None:
        given = {"config": model.config, "inputs_embeds": torch.empty(*ids.shape, 0, dtype=model.config.dtype, device=ids.device), "attention_mask": None,
                 "past_key_values": None, "position_ids": positions}
        kwargs["attention_mask"] = {"full_attention": create_causal_mask(**given), "sliding_attention": create_sliding_window_causal_mask(**given)}
    return args, kwargs


def load_sharded(folder: str | Path, mesh: DeviceMesh | None = None, lora: Lora | None = Lora(), attention: str = "sinks",
                 compute: torch.dtype = torch.bfloat16, offload: bool = False, checkpointing: bool = True, seed: int = 0) -> PreTrainedModel:
    """gpt-oss with fresh adapters (B = 0: it starts as the model in `folder`), its rows over the ranks of `mesh`; None: all here, no FSDP.
    Or another transformers model with q, k, v, o: a small world model for one GPU; its attention is lm's.

    Frozen weights are stored in `compute`, adapters in float32. The folder may be MXFP4 or plain. Each rank reads its own rows of each
    tensor and holds no other tensor meanwhile. Every rank calls it. Raises ValueError when folder and config do not agree.
    """
    device = torch.device("cpu") if offload else distributed.device()
    weights, config = entries(folder), AutoConfig.from_pretrained(folder)
    is_gptoss = config.model_type == "gpt_oss"
    kernel = training_attention(attention, distributed.device()) if is_gptoss else "packed" if mesh is not None else "sdpa"
    if getattr(config, "quantization_config", None):
        del config.quantization_config  # what is trained is the dequantised model
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=compute, attn_implementation=kernel)
    model.config.use_cache = False
    if is_gptoss:
        model.model.register_forward_pre_hook(_mask_packed, with_kwargs=True)
    if lora:
        # Into the model, not around it: it stays a GptOssForCausalLM, with .model and .lm_head where lm.py looks for them.
        peft.inject_adapter_in_model(lora.config(), model, low_cpu_mem_usage=True)
        assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad), "an update at lr 2e-4 is lost in bf16"
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    _check(folder, weights, shapes)
    if mesh is not None:
        distributed.shard(model, mesh, compute, offload, checkpointing)
    elif checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    files = distributed.ShardFiles(folder)

    def give(name: str, rows: slice) -> torch.Tensor:
        if ".lora_" in name:
            return _fresh(name, shapes[name], seed)[rows]
        name = name.replace(".base_layer.", ".")
        if name in weights:
            return files.read(name, rows)
        blocks, scales = (files.read(name + part, rows).to(device) for part in ("_blocks", "_scales"))
        # (rows, out, in/32, 16) and (rows, out, in/32) -> (rows, in, out), on the GPU if there is one. Every MXFP4 number is exact in bf16.
        return convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)

    distributed.fill(model, give, device)
    model.model.rotary_emb.to(distributed.device())  # with offload: FSDP brings parameters to the GPU, not buffers
    return model


def _check(folder: str | Path, weights: dict[str, Entry], shapes: dict[str, torch.Size]) -> None:
    """Every weight of the model is in the folder, in one form, and nothing else is."""
    wanted = {name.replace(".base_layer.", ".") for name in shapes if ".lora_" not in name}
    packed = {name for name in wanted if name + "_blocks" in weights and name + "_scales" in weights and name not in weights}
    wanted = wanted - packed | {name + part for name in packed for part in ("_blocks", "_scales")}
    if missing := sorted(wanted - set(weights)):
        raise ValueError(f"{folder}: {len(missing)} weights of its config are in no file, first {missing[0]}")
    if strange := sorted(set(weights) - wanted):
        raise ValueError(f"{folder}: {len(strange)} tensors have no place in its config, first {strange[0]}")


def _fresh(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """A new adapter matrix, whole, and the same on every rank: B is 0, A uniform in +-1/sqrt(in), as peft draws it."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(lm.mix(seed, name))
    return (2 * torch.rand(shape, generator=generator) - 1) / shape[1] ** 0.5


# ---- the adapter -----------------------------------------------------------------------------------------------------------


def adapter_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The trained matrices, whole, in float32 on the CPU, under the names that peft gives them on disk. All ranks call it (it gathers)."""
    state = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            value = parameter.detach()
            if isinstance(value, DTensor):
                value = value.to(distributed.device()).full_tensor()
            state["base_model.model." + name.replace(".default.", ".")] = value.to("cpu", torch.float32, copy=True)  # training goes on
    return state


def save_adapter(model: PreTrainedModel, folder: str | Path, lora: Lora = Lora()) -> None:
    """A folder that peft, vLLM and merge() read. All ranks call it; rank 0 writes, beside, and renames."""
    folder, state = Path(folder), adapter_state(model)
    if distributed.rank() == 0:
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(state, temporary / "adapter_model.safetensors", {"format": "pt"})
        lora.config().save_pretrained(temporary)
        _replace(temporary, folder)
    distributed.everyone(True)  # no rank goes on to read what is not there yet


def _read_adapter(adapter: str | Path | dict[str, torch.Tensor], lora: Lora) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], float]:
    """({weight's name: (A, B)}, alpha / r) of an adapter folder, or of adapter_state() made with `lora`. Raises ValueError."""
    scaling = lora.alpha / lora.rank
    if not isinstance(adapter, dict):
        try:
            config = json.loads((Path(adapter) / "adapter_config.json").read_text())
            state = load_file(Path(adapter) / "adapter_model.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"{adapter} holds no whole LoRA adapter ({error})") from error
        odd = [key for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters", "fan_in_fan_out") if config.get(key)]
        if config.get("peft_type") != "LORA" or odd or config.get("bias", "none") != "none":
            raise ValueError(f"{adapter}: only plain LoRA can be merged here, not {config.get('peft_type')} with {', '.join(odd) or 'bias'}")
        scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
        adapter = state
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in adapter.items():
        match = re.fullmatch(rf"(?:base_model\.model\.)?(model\.layers\.\d+\.self_attn\.(?:{'|'.join(PROJECTIONS)}))\.lora_([AB])(?:\.default)?\.weight", name)
        if not match:
            raise ValueError(f"the adapter changes {name}; only LoRA on {', '.join(PROJECTIONS)} of the attention can be merged without touching the experts")
        halves.setdefault(match[1] + ".weight", {})[match[2]] = value.float()
    if not halves or (odd := [name for name, half in halves.items() if len(half) != 2]):
        raise ValueError("the adapter is empty" if not halves else f"the adapter has only one of A and B for {odd[0]}")
    return {name: (half["A"], half["B"]) for name, half in halves.items()}, scaling


# ---- merge -----------------------------------------------------------------------------------------------------------------


def merge(folder: str | Path, adapter: str | Path | dict[str, torch.Tensor], out: str | Path, lora: Lora = Lora()) -> dict:
    """`folder` with the adapter added into its bf16 attention weights: summed in float32, rounded once. Returns {tensors, gigabytes, scaling}.

    Files are copied one by one and the changed tensors written over at their place, so that everything else (MXFP4 experts, tokenizer,
    generation config, quantization_config) is the same byte for byte; memory holds one tensor. Written beside and renamed. One process
    calls it. Raises ValueError for an adapter that does not fit or has diverged, a cut-off file, a full disk. `lora` is for a state only.
    """
    folder, out = Path(folder), Path(out)
    if out.resolve() == folder.resolve():
        raise ValueError(f"{out}: merge into another folder than the base's")
    weights, (pairs, scaling) = entries(folder), _read_adapter(adapter, lora)
    for name, (a, b) in pairs.items():
        entry = weights.get(name)
        if entry is None or entry.dtype != "BF16" or entry.shape != (b.shape[0], a.shape[1]) or a.shape[0] != b.shape[1]:
            there = "is not in the checkpoint" if entry is None else f"is {entry.dtype} {entry.shape} in the checkpoint"
            raise ValueError(f"{name} {there}; the adapter's A {tuple(a.shape)} and B {tuple(b.shape)} are for another model")
    files = sorted(file for file in folder.iterdir() if file.is_file())
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a merge that was killed
    temporary.mkdir(parents=True)
    need, free = sum(file.stat().st_size for file in files), shutil.disk_usage(temporary).free
    if need > 0.99 * free:
        temporary.rmdir()
        raise ValueError(f"{out} needs {need / 1e9:.1f} GB on its disk, and {free / 1e9:.1f} are free")
    with tqdm(total=need, desc="merging", unit="B", unit_scale=True, dynamic_ncols=True) as bar:
        for file in files:
            shutil.copyfile(file, temporary / file.name)
            with open(temporary / file.name, "r+b") as stream:
                for name in [name for name in pairs if weights[name].file == file]:
                    _add(stream, weights[name], *pairs[name], scaling)
            bar.update(file.stat().st_size)
    _replace(temporary, out)
    return {"tensors": len(pairs), "gigabytes": need / 1e9, "scaling": scaling}


def _add(stream, entry: Entry, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
    """W + scaling B A in the place of W, in a file that is open for both."""
    stream.seek(entry.start)
    weight = torch.frombuffer(bytearray(stream.read(entry.end - entry.start)), dtype=torch.bfloat16).view(entry.shape)
    merged = (weight.float() + scaling * (b @ a)).to(torch.bfloat16)  # LoRA, Eq. 3
    if not merged.isfinite().all():
        raise ValueError(f"the adapter has diverged: a merged weight of {entry.file.name} is not finite")
    stream.seek(entry.start)
    stream.write(merged.flatten().view(torch.uint8).numpy().tobytes())


def _replace(temporary: Path, folder: Path) -> None:
    """`temporary` becomes `folder`; killed in between, the old one is whole beside it, as folder.old."""
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@torch.no_grad()
def kl(model: PreTrainedModel, merged: str | Path, sequences: Sequence[Sequence[int]]) -> float:
    """Mean over all tokens (nats) of KL(p with the adapter beside || p with the adapter merged): what the rounding of the merge costs.

    One model serves for both: the merged attention weights stand in for the base's, with the adapter's scale at 0, and go again. All ranks
    call it with the same sequences; logits of one sequence (T, V) are held twice, so keep them at 2k tokens.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    weights, swaps = entries(merged), []
    for name, layer in layers.items():
        parameter = layer.base_layer.weight.data
        with safe_open(weights[name + ".weight"].file, "pt") as file:
            value = file.get_tensor(name + ".weight").to(parameter.dtype)
        if isinstance(parameter, DTensor):  # every rank read the whole (24 MB at most) and keeps its rows: nothing is sent
            value = distribute_tensor(value.to(parameter.device_mesh.device_type), parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
            parameter = parameter.to_local()
        swaps.append((parameter, value.to(parameter.device)))
    training, total, count = model.training, 0.0, 0
    model.eval()
    for ids in sequences:
        row, _, where = lm.pack([([], list(ids))], distributed.device())  # of another model than gpt-oss the attention asks where it begins
        beside = model(input_ids=row, use_cache=False, **where).logits[0]  # (T, V)
        scales = _swap(layers, swaps, None)
        inside = model(input_ids=row, use_cache=False, **where).logits[0]  # (T, V)
        _swap(layers, swaps, scales)
        for p, q in zip(beside.split(256), inside.split(256)):
            p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            total += float((p.exp() * (p - q)).sum())
        count += row.shape[1]
    model.train(training)
    return total / count


def _swap(layers: dict[str, LoraLayer], swaps: list[tuple[torch.Tensor, torch.Tensor]], scales: list[dict] | None) -> list[dict]:
    """Exchange the two tensors of every pair; set the adapters' scales, to 0 for None. Returns the scales before."""
    for one, other in swaps:
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
    before = [dict(layer.scaling) for layer in layers.values()]
    for k, layer in enumerate(layers.values()):
        layer.scaling.update(scales[k] if scales else dict.fromkeys(layer.scaling, 0.0))
    return before
