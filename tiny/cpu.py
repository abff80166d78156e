"""A laptop's model, made faster: a Llama of 3 M parameters on a CPU. It computes what lm.py computes.

    load(folder, ...)    lm.load, and the two below where the model is a Llama and there is no GPU
    blocks               attention over lm.pad's rows: a block of queries meets the keys up to its own end
    Llama                stands where lm.Reader stands, by hand

    B rows, T queries, S keys, N tokens of several prompts end to end, W model width, H query heads, H_kv
    heads of keys and values, D their width

A laptop's model is so small that transformers' own forward spends most of a token on Python, on casts and on
copies of keys (NOTES 10.5).
"""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

import distributed
import lm


def load(folder: str | Path, made_by: str = "", context: int = 0,
         compute: torch.dtype | None = None) -> lm.LM:
    """lm.load, with the attention and the reader of this file where they know the model."""
    # Other models may have sinks, windows or soft caps, which `blocks` does not know.
    config = AutoConfig.from_pretrained(lm.check_folder(folder, made_by))
    llama = config.model_type == "llama" and not torch.cuda.is_available()
    model = lm.load(folder, made_by, context, compute, "blocks" if llama else "")
    model.reader = read
    return model


def load_to_train(folder: str | Path, made_by: str = "", context: int = 0, offload: bool = False) -> lm.LM:
    """lm.load_sharded where there is a process group (on a GPU there always is one: distributed.init), else
    load. `offload` without a group is a mistake of the user's: ValueError."""
    if distributed.grouped():
        return lm.load_sharded(folder, made_by, context, offload=offload)
    if offload:
        raise ValueError(lm.NO_OFFLOAD)
    return load(folder, made_by, context)


def read(model, prompts: list[list[int]], pad_id: int) -> "lm.Reader | Llama":
    """A reader of `prompts`: Llama where it does all that this model does."""
    return Llama(model, prompts) if _known(model) else lm.Reader(model, prompts, pad_id)


def _known(model) -> bool:
    """Whether Llama does all that this model does. `blocks`: load found a Llama, and no GPU."""
    config = model.config
    return (getattr(config, "_attn_implementation", "") == "blocks" and type(model) is LlamaForCausalLM
            and (config.hidden_act, config.attention_bias, config.mlp_bias) == ("silu", False, False)
            and config.rope_parameters["rope_type"] in ("default", "linear", "llama3", "yarn"))


# ---- attention of padded rows ------------------------------------------------------------------------------

BLOCK = 128  # queries at a time
HIDDEN = -1e30  # added to a score. With -inf a padded query, which sees nothing, would be nan


def block_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """Causal attention of padded rows on the CPU: query (B, H, T, D), key and value (B, H_kv, S, D) ->
    (B, T, H, D), None. The T queries are the last of the S positions.

    A block of queries meets the keys up to its own end. So half of the scores are never computed, and what is
    alive fits the processor's cache. Eager attention maps new memory for each score tensor over 32 MB; the
    CPU's fused attention has a slow backward (NOTES 10.5). `attention_mask` (B, 1, 1, S), or None, is added
    to the scores.
    """
    assert dropout == 0, "not written"
    device = query.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    groups, before = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    with torch.autocast(device, enabled=False):  # it would make the softmax's input a float32 tensor
        query, key, value = (query * scaling).to(compute), key.to(compute), value.to(compute)
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        pieces = []
        for start in range(0, query.shape[2], BLOCK):
            q = query[:, :, start : start + BLOCK]
            own, end = before + start, before + start + q.shape[2]  # the block's own keys
            scores = q @ key[:, :, :end].transpose(2, 3)  # (B, H, q, end)
            if q.shape[2] > 1:
                scores[..., own:] += torch.full((end - own, end - own), HIDDEN, dtype=compute).triu(1)
            if attention_mask is not None:
                scores += attention_mask[..., :end].to(compute)
            pieces.append(scores.softmax(-1) @ value[:, :, :end])
        return torch.cat(pieces, 2).transpose(1, 2).contiguous(), None


def _hide_padding(*args, attention_mask=None, allow_is_causal_skip=True, **kwargs) -> torch.Tensor | None:
    """block_attention's mask: HIDDEN at padded keys (B, 1, 1, S). attention_mask (B, S) is False there."""
    assert allow_is_causal_skip, "block_attention does not take packed rows"
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return torch.zeros(attention_mask.shape).masked_fill(~attention_mask, HIDDEN)[:, None, None]


AttentionInterface.register("blocks", block_attention)
AttentionMaskInterface.register("blocks", _hide_padding)


# ---- a Llama, read by hand ---------------------------------------------------------------------------------

ROOM = 32  # tokens that the memory of keys and values grows by


class Llama:
    """By hand. Prompts are read end to end, without padding; then rows are aligned on the right.

    Like LlamaModel under autocast it keeps float32 between the layers, and multiplies matrices in autocast's
    type. Keys and values stay float32: a query at a time, float32 is faster here than bf16.
    """

    def __init__(self, model, prompts: list[list[int]]):
        self.net, self.config = model.model, model.config
        self.compute = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        self.layers = [self._weights(layer) for layer in self.net.layers]
        distinct = lm.distinct(prompts)
        lengths = torch.tensor([len(p) for p in distinct])
        self.used = int(lengths.max())  # T
        sizes = len(prompts), self.config.num_key_value_heads, self.used + ROOM, self.config.head_dim
        self.space = [torch.zeros(2, *sizes) for _ in self.layers]  # (2, B, H_kv, T + room, D)
        self.positions = torch.tensor([len(p) for p in prompts])  # (B,): of the next token
        hidden = torch.arange(sizes[2]) < self.used - self.positions[:, None]  # (B, T + room)
        self.mask = torch.zeros(hidden.shape).masked_fill(hidden, HIDDEN)[:, None, None]

        ids = torch.tensor([token for prompt in distinct for token in prompt])  # (N,)
        places = torch.cat([torch.arange(length) for length in lengths])  # (N,)
        rows = list(zip(distinct.values(), lengths.tolist(), (lengths.cumsum(0) - lengths).tolist()))

        def attend(n: int, *qkv: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(qkv[0])  # (N, H, D)
            for its_rows, length, begin in rows:
                q, k, v = (part[begin : begin + length].transpose(0, 1) for part in qkv)  # (heads, t, D)
                out[begin : begin + length] = F.scaled_dot_product_attention(
                    q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0].transpose(0, 1)
                for row in its_rows:
                    self.space[n][0, row, :, self.used - length : self.used] = k
                    self.space[n][1, row, :, self.used - length : self.used] = v
            return out

        last = self._forward(ids, places, attend, lengths.cumsum(0) - 1)  # of the different prompts
        which = {row: k for k, its_rows in enumerate(distinct.values()) for row in its_rows}
        self.last = last[[which[row] for row in range(len(prompts))]]  # (B, W)

    def _weights(self, layer) -> SimpleNamespace:
        attend, mlp = layer.self_attn, layer.mlp
        joined = lambda *parts: torch.cat([part.weight for part in parts]).to(self.compute)
        return SimpleNamespace(
            norm=layer.input_layernorm.weight, qkv=joined(attend.q_proj, attend.k_proj, attend.v_proj),
            o=joined(attend.o_proj), mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=joined(mlp.gate_proj, mlp.up_proj), down=joined(mlp.down_proj))

    def _forward(self, ids: torch.Tensor, places: torch.Tensor, attend, wanted=slice(None)) -> torch.Tensor:
        """Tokens (N,) at their places (N,) -> what the head reads at the wanted ones. attend(layer, q, k, v):
        (N, H, D), two of (N, H_kv, D) -> (N, H, D)."""
        heads, more, width = (getattr(self.config, name) for name in (
            "num_attention_heads", "num_key_value_heads", "head_dim"))
        norm = lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)
        with torch.autocast("cpu", enabled=False):
            x = self.net.embed_tokens(ids)  # (N, W)
            cos, sin = (part[0, :, None] for part in self.net.rotary_emb(x, places[None]))  # (N, 1, D)
            sin = torch.cat([-sin[..., : width // 2], sin[..., width // 2 :]], -1)  # rotate_half's sign
            for n, layer in enumerate(self.layers):
                qkv = F.linear(norm(x, layer.norm).to(self.compute), layer.qkv).float()
                qk, v = qkv.view(len(ids), -1, width).split([heads + more, more], 1)
                qk = (qk * cos).addcmul_(qk.roll(width // 2, -1), sin)
                out = attend(n, qk[:, :heads], qk[:, heads:], v).flatten(1)  # (N, H x D)
                if n + 1 == len(self.layers):
                    out, x = out[wanted], x[wanted]
                x = x + F.linear(out.to(self.compute), layer.o)
                gate, up = F.linear(norm(x, layer.mlp_norm).to(self.compute), layer.gate_up).chunk(2, -1)
                x = x + F.linear(F.silu(gate) * up, layer.down)
            return norm(x, self.net.norm.weight)

    def read(self, token: torch.Tensor) -> None:
        """One more token (B,)."""
        if self.used == self.space[0].shape[3]:
            self.space = [F.pad(part, (0, 0, 0, ROOM)) for part in self.space]
            self.mask = F.pad(self.mask, (0, ROOM))
        self.used += 1

        def attend(n: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.space[n][:, :, :, : self.used]  # (B, H_kv, T, D)
            keys[:, :, -1], values[:, :, -1] = k, v
            q = (q * q.shape[-1] ** -0.5).view(len(q), keys.shape[1], -1, q.shape[-1])
            # q (B, H_kv, H / H_kv, D)
            scores = q @ keys.transpose(2, 3) + self.mask[..., : self.used]
            return (scores.softmax(-1) @ values).flatten(1, 2)

        self.last = self._forward(token, self.positions, attend)
        self.positions = self.positions + 1

    def keep(self, rows: list[int]) -> None:
        """As lm.Reader.keep."""
        at = torch.tensor(rows)  # (B,)
        self.space = [part.index_select(1, at) for part in self.space]
        self.last, self.mask, self.positions = self.last[at], self.mask[at], self.positions[at]
