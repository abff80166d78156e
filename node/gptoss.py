"""What only the 120B world model needs: talk (harmony), load for training, merge.

    W' = W + alpha/r B A            LoRA, arXiv 2106.09685, Eq. 3

W (out, in) is an attention projection in bf16; A is (r, in), B is (out, r). E is the number of experts.

gpt-oss-120b has 117 billion weights. 115 of them are experts in MXFP4: blocks (E, out, in/32, 16) uint8, two
4-bit numbers a byte, and scales (E, out, in/32) uint8, a power of two for 32 numbers. It is served like that
(65 GB, node/engine.py) and trained in bf16 (234 GB).

- Only adapters on q, k, v, o are trained. These are bf16 in the checkpoint: the merge is one rounding, and
  the experts stay as they are, byte for byte. To merge an adapter of the experts, they would have to be
  rounded to 4 bits again: 11 % off (NOTES 8.4).
- The adapter is merged because vLLM's LoRA kernels give NaN on Hopper for long prompts (vllm #48590, NOTES
  8.5).
- Each rank reads its own experts only, layer by layer. transformers' own loading would take 8 x 234 GB of
  host memory on one node (NOTES 8.3).
- gpt-oss has attention sinks, which few kernels can train (node/sinks.py).

Where we differ from the authors' script: LoRA on "all linear" there, on q, k, v, o here, for the merge's
sake.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import data
import distributed
import lm
from distributed import Entry, ShardFiles
from node import sinks

# ---- harmony: how gpt-oss is talked to ---------------------------------------------------------------------

# The format's own text (openai/harmony, docs/format.md). With today's date every prompt would differ from
# those that were trained on, so the date is fixed (NOTES 8.2).
SYSTEM = """You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2025-08-05

Reasoning: low

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
ROLES = {"system": "developer", "user": "user"}  # what others call the system message is the developer's here
ANSWER = [("<|channel|>", "analysis"), ("<|message|>", None), ("<|end|>", ""), ("<|start|>", "assistant"),
          ("<|channel|>", "final"), ("<|message|>", None), ("<|return|>", "")]  # None: what the model says


def read(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, str]:
    """(reason, final) of sampled ids; the inverse of Harmony.completion_ids.

    Raises ValueError on anything else: another channel, a tool call, a part missing, tokens after the end, no
    end.
    """
    names = {index: token for token, index in tokenizer.get_added_vocab().items()}
    parts: list[tuple[str, list[int]]] = [("", [])]  # each special token, and the ids that follow it
    for index in ids:
        if index in names:
            parts.append((names[index], []))
        else:
            parts[-1][1].append(index)
    said = [(token, tokenizer.decode(part, clean_up_tokenization_spaces=False)) for token, part in parts]
    expected = [("", ""), *ANSWER]
    fits = len(said) == len(expected)
    for (token, words), (name, text) in zip(expected, said):
        fits = fits and token == name and words in (None, text)
    if not fits:
        shape = "".join(token + (text if len(text) < 20 else "...") for token, text in said)
        cut = "" if shape.endswith("<|return|>") else " (cut off?)"
        raise ValueError(f"not a harmony answer{cut}: {shape[:200]!r} instead of analysis, final, <|return|>")
    return said[2][1], said[6][1]


class Harmony(lm.Template):
    """gpt-oss's channels: the reason stands in analysis, the text in final."""

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Token ids of a chat (roles system and user) up to `<|start|>assistant`. Contents are disarmed.

        The checkpoint's own template would write today's date. Raises ValueError for another role.
        """
        text = f"<|start|>system<|message|>{SYSTEM}<|end|>"
        for message in messages:
            role, content = message["role"], lm.disarm(self.tokenizer, message["content"])
            if role not in ROLES:
                raise ValueError(f"harmony prompts here have roles {', '.join(ROLES)}; not {role!r}")
            head = "# Instructions\n\n" if role == "system" else ""
            text += f"<|start|>{ROLES[role]}<|message|>{head}{content}<|end|>"
        return self.tokenizer(text + "<|start|>assistant", add_special_tokens=False).input_ids

    def completion_ids(self, text: str, reason: str = "") -> list[int]:
        """Token ids of an answer, `<|return|>` included: it ends the turn and is learned like any other
        token. Both texts are disarmed."""
        said, answer = iter((reason, text)), ""
        for token, words in ANSWER:
            answer += token + (lm.disarm(self.tokenizer, next(said)) if words is None else words)
        return self.tokenizer(answer, add_special_tokens=False).input_ids

    def read(self, sample: lm.Sample) -> str:
        reason, final = read(self.tokenizer, sample.ids)
        return f"{data.one_line(reason)}\n{final}"  # a second line of reasoning is no part of the text


def template(tokenizer: PreTrainedTokenizerBase) -> lm.Template:
    """How a model with this tokenizer is talked to."""
    return (Harmony if "<|channel|>" in tokenizer.get_added_vocab() else lm.Template)(tokenizer)


# ---- load for training -------------------------------------------------------------------------------------

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Lora:
    """Adapters on q, k, v, o. Rank and alpha are those of the authors' script (NOTES 2.4)."""

    rank: int = 8
    alpha: int = 16

    def config(self) -> peft.LoraConfig:
        return peft.LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=list(PROJECTIONS),
                               lora_dropout=0.0, bias="none")


def load_sharded(folder: str | Path, mesh: DeviceMesh | None = None, lora: Lora | None = Lora(),
                 attention: str = "sinks", compute: torch.dtype = torch.bfloat16, offload: bool = False,
                 checkpointing: bool = True, seed: int = 0) -> PreTrainedModel:
    """gpt-oss with fresh adapters (B = 0: it starts as the model in `folder`), its rows over the ranks of
    `mesh`.

    Without `mesh` all rows are here, without FSDP. Any other transformers model with q, k, v, o will do too:
    a small world model for one GPU, with lm's attention. Frozen weights are stored in `compute`, adapters in
    float32. The folder may be MXFP4 or plain. Each rank reads its own rows of each tensor and holds no other
    tensor meanwhile. Every rank calls it. Raises ValueError when folder and config do not agree.
    """
    device = torch.device("cpu") if offload else distributed.device()
    files, config = ShardFiles(folder), AutoConfig.from_pretrained(folder)
    is_gptoss = config.model_type == "gpt_oss"
    if is_gptoss:
        kernel = sinks.training_attention(attention, distributed.device())
    else:
        kernel = "sdpa" if mesh is None else "packed"
    if getattr(config, "quantization_config", None):
        del config.quantization_config  # the dequantised model is trained
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=compute, attn_implementation=kernel)
    model.config.use_cache = False
    if is_gptoss:
        model.model.register_forward_pre_hook(sinks.mask_packed, with_kwargs=True)
    if lora:
        # Into the model, not around it: it stays a GptOssForCausalLM, with .model and .lm_head where lm.py
        # looks.
        peft.inject_adapter_in_model(lora.config(), model, low_cpu_mem_usage=True)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert all(p.dtype == torch.float32 for p in trained), "an update at lr 2e-4 is lost in bf16"
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    check(files, model)
    if mesh is not None:
        distributed.shard(model, mesh, compute, offload, checkpointing)
    elif checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def read_rows(name: str, rows: slice) -> torch.Tensor:
        if ".lora_" in name:
            return _fresh(name, shapes[name], seed)[rows]
        name = name.replace(".base_layer.", ".")
        return files.read(name, rows) if name in files.entries else _dequantised(files, name, rows, device)

    distributed.load_rows(model, read_rows, device)
    model.model.rotary_emb.to(distributed.device())  # offloading brings parameters to the GPU, not buffers
    return model


def check(files: ShardFiles, model: PreTrainedModel) -> None:
    """Every weight of the model is in the folder, plain or as blocks and scales, and nothing else is but a
    tied head: or FolderError."""
    there, wanted = set(files.entries), set()
    for name, _ in model.named_parameters():
        name = name.replace(".base_layer.", ".")
        packed = {name + "_blocks", name + "_scales"}
        if ".lora_" not in name:
            wanted |= packed if name not in there and packed <= there else {name}
    files.check(wanted, set(model.state_dict()))


def _dequantised(files: ShardFiles, name: str, rows: slice, device: torch.device) -> torch.Tensor:
    """MXFP4 blocks (rows, out, in/32, 16) and scales (rows, out, in/32) -> (rows, in, out), on the GPU if
    there is one. Every MXFP4 number is exact in bf16."""
    blocks, scales = (files.read(name + part, rows).to(device) for part in ("_blocks", "_scales"))
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)


def _fresh(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """A new adapter matrix, whole, and the same on every rank: B is 0, A uniform in +-1/sqrt(in), as peft
    draws it."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(lm.mix(seed, name))
    return (2 * torch.rand(shape, generator=generator) - 1) / shape[1] ** 0.5


# ---- the adapter -------------------------------------------------------------------------------------------


def adapter_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The trained matrices, whole, in float32 on the CPU, under the names that peft gives them on disk. All
    ranks call it."""
    state = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            value = distributed.gathered(parameter.detach())
            name = "base_model.model." + name.replace(".default.", ".")
            state[name] = value.to("cpu", torch.float32, copy=True)  # a copy: training goes on
    return state


def save_adapter(model: PreTrainedModel, folder: str | Path, lora: Lora = Lora()) -> dict[str, torch.Tensor]:
    """A folder that peft and vLLM read. Returns its matrices. All ranks call it; rank 0 writes, beside, and
    renames."""
    folder, state = Path(folder), adapter_state(model)
    if distributed.rank() == 0:
        with lm.writing(folder):
            temporary = _empty_beside(folder)
            save_file(state, temporary / "adapter_model.safetensors", {"format": "pt"})
            lora.config().save_pretrained(temporary)
            lm.replace_folder(temporary, folder)
    distributed.barrier()  # no rank goes on to read what is not there yet
    return state


def _empty_beside(folder: Path) -> Path:
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir(parents=True)
    return temporary


# ---- merge -------------------------------------------------------------------------------------------------


def merge(folder: str | Path, state: dict[str, torch.Tensor], scaling: float, out: str | Path) -> dict:
    """`folder` with the adapter of adapter_state added into its bf16 attention weights: summed in float32,
    rounded once. `scaling`: alpha / r.

    Files are copied one by one and the changed tensors written over at their place. So everything else (MXFP4
    experts, tokenizer, generation config, quantization_config) is the same byte for byte, and memory holds
    one tensor. Written beside and renamed. One process calls it. Returns {tensors, gigabytes, scaling}.
    Raises ValueError for weights that are not bf16, an adapter that has diverged, a cut-off file, a full
    disk.
    """
    folder, out = Path(folder), Path(out)
    if out.resolve() == folder.resolve():
        raise ValueError(f"{out}: merge into another folder than the base's")
    entries, pairs = ShardFiles(folder).entries, {}
    for half in (half for half in state if ".lora_A." in half):
        a, b = state[half], state[half.replace(".lora_A.", ".lora_B.")]  # (r, in), (out, r)
        name = half.removeprefix("base_model.model.").replace(".lora_A.", ".")
        entry, shape = entries.get(name), (b.shape[0], a.shape[1])
        if entry is None or (entry.dtype, entry.shape) != ("BF16", shape):
            there = "is not" if entry is None else f"is {entry.dtype} {entry.shape}"
            raise ValueError(f"{name} {there} in {folder}; the adapter is for BF16 {shape}")
        pairs[name] = a, b
    files = sorted(file for file in folder.iterdir() if file.is_file())
    temporary = _empty_beside(out)
    need, free = sum(file.stat().st_size for file in files), shutil.disk_usage(temporary).free
    if need > 0.99 * free:
        temporary.rmdir()
        raise ValueError(f"{out} needs {need / 1e9:.1f} GB on its disk, and {free / 1e9:.1f} are free")
    with tqdm(total=need, desc="merging", unit="B", unit_scale=True, dynamic_ncols=True) as bar:
        for file in files:
            shutil.copyfile(file, temporary / file.name)
            with open(temporary / file.name, "r+b") as stream:
                for name in [name for name in pairs if entries[name].file == file]:
                    _add(stream, entries[name], *pairs[name], scaling)
            bar.update(file.stat().st_size)
    lm.replace_folder(temporary, out)
    return {"tensors": len(pairs), "gigabytes": need / 1e9, "scaling": scaling}


def _add(stream, entry: Entry, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
    """W + scaling B A in the place of W, in a file that is open for both."""
    stream.seek(entry.start)
    stored = bytearray(stream.read(entry.end - entry.start))
    weight = torch.frombuffer(stored, dtype=torch.bfloat16).view(entry.shape)
    merged = (weight.float() + scaling * (b @ a)).to(torch.bfloat16)  # LoRA, Eq. 3
    if not merged.isfinite().all():
        raise ValueError(f"the adapter has diverged: a merged weight of {entry.file.name} is not finite")
    stream.seek(entry.start)
    stream.write(merged.flatten().view(torch.uint8).numpy().tobytes())


def merge_all_ranks(model: PreTrainedModel, config, sequences: Sequence[Sequence[int]]) -> dict:
    """The end of sft.fit_world_model, on all ranks: save the adapter, merge it into config.out, compare the
    two.

    Returns what to report; merge()'s part on rank 0 alone. Raises ValueError on all ranks when rank 0 cannot.
    """
    lora, adapter = Lora(config.lora_rank, config.lora_alpha), f"{config.out}.adapter"
    state, report, failed = save_adapter(model, adapter, lora), {}, ""
    if distributed.rank() == 0:
        try:
            report = merge(config.base, state, lora.alpha / lora.rank, config.out)
        except (ValueError, OSError) as error:  # a full disk: the other ranks must not wait
            failed = f"{error}; the adapter is in {adapter}"
    if message := distributed.gather(failed)[0]:
        raise ValueError(message)
    return report | {"kl of the merge": kl(model, config.out, sequences)}


@torch.no_grad()
def kl(model: PreTrainedModel, merged: str | Path, sequences: Sequence[Sequence[int]]) -> float:
    """Mean over all tokens (nats) of KL(p with the adapter beside || p with the adapter merged): what the
    merge's rounding costs.

    One model serves for both: the merged attention weights take the place of the base's, with the adapter's
    scale at 0, and leave it again. All ranks call it with the same sequences. Logits of one sequence (T, V)
    are held twice, so keep them at 2k tokens.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    files, swaps = ShardFiles(merged), []
    for name, layer in layers.items():
        weight = layer.base_layer.weight.data
        value = files.read(name + ".weight", slice(None)).to(weight.dtype)
        if isinstance(weight, DTensor):  # every rank has read it whole (24 MB at most): nothing is sent
            mesh = weight.device_mesh
            value = distribute_tensor(value.to(mesh.device_type), mesh, weight.placements, src_data_rank=None)
            weight, value = weight.to_local(), value.to_local()
        swaps.append((weight, value.to(weight.device)))
    training, total, count = model.training, 0.0, 0
    model.eval()
    for ids in sequences:
        row, _, where = lm.pack([([], list(ids))], distributed.device())  # lm's attention wants `where`
        beside = model(input_ids=row, use_cache=False, **where).logits[0]  # (T, V)
        _exchange(swaps)
        for layer in layers.values():
            layer.scale_layer(0.0)
        inside = model(input_ids=row, use_cache=False, **where).logits[0]  # (T, V)
        _exchange(swaps)
        for layer in layers.values():
            layer.unscale_layer()
        for p, q in zip(beside.split(256), inside.split(256)):
            p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            total += float((p.exp() * (p - q)).sum())
        count += row.shape[1]
    model.train(training)
    return total / count


def _exchange(swaps: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for here, there in swaps:
        kept = here.clone()
        here.copy_(there)
        there.copy_(kept)
