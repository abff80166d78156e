"""gpt-oss-120b as a world model: how it is talked to, loaded in shards, trained by LoRA, merged.

    W' = W + alpha/r B A                             LoRA, arXiv 2106.09685, Eq. 3
    softmax over (q k_1, ..., q k_t, s)              s: a learned number for each head, the sink

W (out, in) is an attention projection in bf16; A is (r, in), B is (out, r). E experts; B rows, H heads (H_kv
of keys and values), T positions, D width of a head.

gpt-oss-120b has 117 billion weights, 115 of them experts in MXFP4: blocks (E, out, in/32, 16) uint8, two
4-bit numbers a byte, and scales (E, out, in/32) uint8, a power of two for 32 numbers. It is served like that
(65 GB) and trained in bf16 (234 GB).

- Only adapters on q, k, v, o are trained (the authors' script: on all linear layers). These are bf16 in the
  folder: the merge is one rounding, and the experts stay as they are, byte for byte. To merge an adapter of
  the experts, they would have to be rounded to 4 bits again: 11 % off (NOTES 8.4).
- The adapter is merged, as vLLM's LoRA kernels give NaN on Hopper for long prompts (vllm #48590; NOTES 8.5).
- The flash kernels for sinks have no backward, and eager attention needs 64 T^2 numbers a layer (NOTES 8.6).
  Here the sink is one more key: query' = (q, s/scaling), key' = (k, 0), and a key (0, 1) with value 0, so
  that its score is s. torch's own kernels do the rest, and their backward is right.
"""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import peft
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AutoConfig, PreTrainedTokenizerBase
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import data
import distributed
import lm
from config import UserError

# ---- harmony: how gpt-oss is talked to ---------------------------------------------------------------------

# The format's own text (openai/harmony, docs/format.md). With today's date every prompt would differ from
# those that were trained on, so the date is fixed (NOTES 8.2).
SYSTEM = """You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2025-08-05

Reasoning: low

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
# What stands before a message. What others call the system message is the developer's here.
HEADS = {"system": "developer<|message|># Instructions\n\n", "user": "user<|message|>"}
# An answer: what stands before the rationale, between it and the text, and at the end.
ANSWER = ("<|channel|>analysis<|message|>",
          "<|end|><|start|>assistant<|channel|>final<|message|>", "<|return|>")


class Harmony(lm.Template):
    """gpt-oss's channels: the rationale stands in analysis, the text in final."""

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Token ids of a chat (roles system and user) up to `<|start|>assistant`."""
        text = f"<|start|>system<|message|>{SYSTEM}<|end|>"
        for message in self.asked(messages):
            text += f"<|start|>{HEADS[message['role']]}{message['content']}<|end|>"
        return self.tokenizer(text + "<|start|>assistant", add_special_tokens=False).input_ids

    def completion_ids(self, text: str, rationale: str = "") -> list[int]:
        """Token ids of an answer. `<|return|>`, which ends it, is learned too. Both texts are disarmed."""
        begin, between, end = ANSWER
        rationale, text = (lm.disarm(self.tokenizer, words) for words in (rationale, text))
        answer = begin + rationale + between + text + end
        return self.tokenizer(answer, add_special_tokens=False).input_ids

    def read(self, sample: lm.Sample) -> str:
        """The text, its rationale in the line before; the inverse of completion_ids. Raises ValueError on
        anything else: another channel, a tool call, a part missing, tokens after the end, no end."""
        added = set(self.tokenizer.get_added_vocab().values())
        marks = [place for place, index in enumerate(sample.ids) if index in added]
        text = lambda ids: str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        ids = sample.ids
        if len(marks) == 7:  # ANSWER's
            _, begin, end, _, _, final, last = marks
            if (text(ids[:begin + 1]), text(ids[end:final + 1]), text(ids[last:])) == ANSWER:
                # A second line of reasoning is no part of the text.
                return f"{data.one_line(text(ids[begin + 1:end]))}\n{text(ids[final + 1:last])}"
        raise ValueError(f"not a harmony answer: {text(ids)[:200]!r} instead of analysis, final, <|return|>")


def template(tokenizer: PreTrainedTokenizerBase) -> lm.Template:
    """How a model with this tokenizer is talked to."""
    return (Harmony if "<|channel|>" in tokenizer.get_added_vocab() else lm.Template)(tokenizer)


# ---- attention with sinks ----------------------------------------------------------------------------------

def sink_attention(module, query, key, value, attention_mask, scaling, s_aux, trie=None, sliding_window=None,
                   dropout=0.0, **_):
    """lm.trie_attention with a sink a head, s_aux (H,), in memory that grows with the length only."""
    assert attention_mask is None and dropout == 0 and trie is not None
    attend = lambda *rows: with_sinks(*rows, s_aux, scaling, sliding_window)
    return lm.in_rows(trie, query, key, value, attend), None


def with_sinks(query, key, value, sink, scaling: float, window: int | None) -> torch.Tensor:
    """Causal attention of rows: query (B, H, T, D), key and value (B, H_kv, T, D), sink (H,) -> (B, T, H,
    D). In a sliding layer a query sees itself and the `window` - 1 keys before it."""
    width, length = query.shape[-1], query.shape[2]
    column = (sink / scaling).to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)  # (B, H, T, 1)
    query = F.pad(torch.cat([query, column], -1), (0, 7))  # GPU kernels want widths in eights
    key, value = F.pad(key, (0, 8)), F.pad(value, (0, 8))
    if window is None or length <= window:
        # The sink stands first, where all see it. So a query is put first too, and dropped below.
        query, key, value = (F.pad(tensor, (0, 0, 1, 0)) for tensor in (query, key, value))
        key[:, :, 0, width] = 1.0
        with _by(SDPBackend.FLASH_ATTENTION, query):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling,
                                                 enable_gqa=True)[:, :, 1:]
    else:
        out = _in_windows(query, key, value, width, scaling, window)
    return out[..., :width].transpose(1, 2).contiguous()


def _by(backend: SDPBackend, query: torch.Tensor) -> contextlib.AbstractContextManager:
    """On a GPU this kernel and no other: a shape that it cannot take raises, where torch would take memory
    for T^2 scores without a word. Neither makes a plan for each new length, as cuDNN does (NOTES 10.11)."""
    return sdpa_kernel(backend) if query.is_cuda else contextlib.nullcontext()


def _in_windows(query, key, value, width: int, scaling: float, window: int) -> torch.Tensor:
    """A sliding layer. Blocks of `window` queries, each against the sink, the block before and its own block.
    With a window of 3, queries 3, 4, 5 are a block and meet keys 0 to 5; query 4 sees keys 2, 3, 4."""
    length = query.shape[2]
    fill = -length % window
    query, key, value = (F.pad(tensor, (0, 0, 0, fill)).unflatten(2, (-1, window)).transpose(1, 2)
                         for tensor in (query, key, value))  # (B, blocks, H, window, D)
    before = lambda tensor: F.pad(tensor, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]  # for each block: the last one
    key, value = (torch.cat([before(tensor), tensor], 3) for tensor in (key, value))  # (..., 2 window, D)
    groups = query.shape[2] // key.shape[2]
    # Now the sink, and the heads: with a mask, the GPU's kernels want all of them. And keys that nobody sees,
    # up to a number in eights: of 257 the kernel's results were reported wrong (NOTES 10.11).
    spare = -(2 * window + 1) % 8
    key, value = (F.pad(tensor, (0, 0, 1, spare)).repeat_interleave(groups, 2) for tensor in (key, value))
    key[..., 0, width] = 1.0
    back = torch.arange(window)[:, None] + window - torch.arange(2 * window)  # how far back each key lies
    sees = ((back >= 0) & (back < window)).expand(key.shape[1], -1, -1).clone()  # (blocks, window, 2 window)
    sees[0, :, :window] = False  # there is nothing before the first block
    sees = F.pad(F.pad(sees, (1, 0), value=True), (0, spare))  # all see the sink, none the spare keys
    sees = sees[None, :, None].expand(len(key), -1, 1, -1, -1)
    sees, blocks = sees.flatten(0, 1).to(query.device), key.shape[1]
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))  # (B * blocks, H, ..., D)
    with _by(SDPBackend.EFFICIENT_ATTENTION, query):
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scaling)
    return out.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


AttentionInterface.register("sinks", sink_attention)  # and no mask, as for "trie"


# ---- load for training -------------------------------------------------------------------------------------

def load(folder: str | Path, context: int, rank: int = 8, alpha: int = 16,
         compute: torch.dtype = torch.bfloat16, offload: bool = False) -> lm.LM:
    """A model with fresh adapters on q, k, v, o (B = 0: it starts as the model in `folder`), in shards where
    there is a group. Frozen weights are stored in `compute`, adapters in float32. Any model will do, gpt-oss
    in MXFP4 or plain; others are computed by lm's attention. All ranks call it. Raises UserError."""
    folder, sharded = lm.check_folder(folder), distributed.grouped()
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None):
        del config.quantization_config  # the dequantised model is trained
    model = lm.build(config, compute, "sinks" if config.model_type == "gpt_oss" else "trie", folder)
    # Into the model, not around it: it stays a causal LM, with .model and .lm_head where lm.py looks. And
    # before it is sharded: adapters that come later are no shards, and each rank's drift apart.
    peft.inject_adapter_in_model(lora_config(rank, alpha), model, low_cpu_mem_usage=True)
    if sharded:
        distributed.shard(model, compute, offload)
    home = torch.device("cpu") if offload else distributed.device()
    distributed.load_weights(model, folder, home, convert_moe_packed_tensors)
    model.model.rotary_emb.to(distributed.device())  # offloading brings parameters to the GPU, not buffers
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            assert parameter.dtype == torch.float32, "an update at lr 2e-4 is lost in bf16"
            # B is 0, A uniform in +-1/sqrt(in), as peft has them; whole, and the same on every rank.
            bound = 0.0 if ".lora_B." in name else parameter.shape[1] ** -0.5
            generator = torch.Generator().manual_seed(lm.mix(name))
            fresh = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator).to(home)
            if isinstance(parameter, DTensor):
                fresh = distribute_tensor(fresh, parameter.device_mesh, parameter.placements,
                                          src_data_rank=None)
            parameter.data.copy_(fresh)
    tokenizer = lm.load_tokenizer(folder)
    loaded = lm.LM(model.eval(), tokenizer, context, compute, sharded, template(tokenizer))
    lm.check_logps(loaded)
    return loaded


def lora_config(rank: int, alpha: int) -> peft.LoraConfig:
    return peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
                           lora_dropout=0.0, bias="none")


# ---- the adapter, and its merge ----------------------------------------------------------------------------

def save(model: lm.LM, base: str | Path, out: str | Path, rank: int, alpha: int) -> None:
    """Write out.adapter, a folder that peft and vLLM read, and `out`: `base` with the adapter merged. All
    ranks call it; rank 0 writes. Raises UserError where the disk is full."""
    adapter = ((name, distributed.gathered(parameter.detach()).float().cpu())
               for name, parameter in model.net.named_parameters() if ".lora_" in name)
    state = {f"base_model.model.{name.replace('.default.', '.')}": value for name, value in adapter}  # peft's
    if distributed.rank() == 0:
        with lm.writing(f"{out}.adapter") as temporary:
            save_file(state, temporary / "adapter_model.safetensors", {"format": "pt"})
            lora_config(rank, alpha).save_pretrained(str(temporary))
            if "system_prompt" in model.tokenizer.init_kwargs:  # the base's tokenizer has another, or none
                model.tokenizer.save_pretrained(temporary)
        merge(base, f"{out}.adapter", out)
    distributed.barrier()


def merge(base: str | Path, adapter: str | Path, out: str | Path) -> None:
    """`base` with an adapter added into its weights: summed in float32, rounded once; file by file, as memory
    may hold one. Other tensors (MXFP4 experts) and files stay as they are, but for files that the adapter has
    too (a tokenizer's). Raises UserError for an adapter of another model, and for a full disk."""
    state = load_file(Path(adapter) / "adapter_model.safetensors")
    config = peft.LoraConfig.from_pretrained(str(adapter))
    halves = {half.removeprefix("base_model.model.").replace(".lora_A.", "."): half
              for half in state if ".lora_A." in half}
    with lm.writing(out) as temporary:
        for file in sorted(path for path in Path(base).iterdir() if path.is_file()):
            names: Sequence[str] = ()
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as opened:
                    names, metadata = sorted(opened.keys() & halves.keys()), opened.metadata()
            if not names:
                newer = Path(adapter) / file.name
                shutil.copyfile(newer if newer.exists() else file, temporary / file.name)
                continue
            tensors = load_file(file)
            for name in names:
                half = halves.pop(name)
                product = state[half.replace(".lora_A.", ".lora_B.")].float() @ state[half].float()
                delta = config.lora_alpha / config.r * product  # Eq. 3
                tensors[name] = (tensors[name].float() + delta).to(tensors[name].dtype)
            save_file(tensors, temporary / file.name, metadata)
        if halves:
            raise UserError(f"{adapter} is of another model: {base} has no weight {min(halves)}")
