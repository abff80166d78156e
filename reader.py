"""What a model has read, as keys and values that it goes on from: the half of sampling that knows the model.

    B rows, T tokens of the longest, N tokens of several prompts end to end, W model width, H query heads,
    H_kv heads of keys and values, D their width

    of(model, prompts, pad_id)    Llama for a Llama on the CPU, Reader for any other model
    reader.last                   (B, W): what the head reads to predict the next token of each row
    reader.read(token)            one more token of each row
    reader.keep(rows)             go on with these rows

The dreams of a group begin with the same prompt, and prompts are ten times as long as answers here. So each
different prompt is read once, and its keys and values are copied to its rows.

A laptop's model is so small that transformers' own forward spends most of a token on Python, on casts and on
copies of keys. Llama below is the same arithmetic without them (NOTES 10.5).
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers import Cache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import attention


def of(model, prompts: list[list[int]], pad_id: int) -> "Reader | Llama":
    """A reader of `prompts`. Without gradients; under the caller's autocast."""
    return Llama(model, prompts) if _known(model) else Reader(model, prompts, pad_id)


def _known(model) -> bool:
    """Whether Llama does all that this model does. `blocks`: lm.load found a Llama, and no GPU."""
    config = model.config
    return (getattr(config, "_attn_implementation", "") == "blocks" and type(model) is LlamaForCausalLM
            and (config.hidden_act, config.attention_bias, config.mlp_bias) == ("silu", False, False)
            and config.rope_parameters["rope_type"] in ("default", "linear", "llama3", "yarn"))


def _distinct(prompts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """The different prompts, and the rows of each.

    >>> _distinct([[5, 6], [7], [5, 6]])
    {(5, 6): [0, 2], (7,): [1]}
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(tuple(prompt), []).append(row)
    return rows


# ---- any model ---------------------------------------------------------------------------------------------


class _Layer(DynamicLayer):
    """Keys and values (B, H_kv, T, D) of a layer, growing inside memory that is taken once. transformers' own
    layer copies them at every token: on the CPU that was four fifths of the time of sampling (LOG.md)."""

    space = None  # (keys, values) with room for more; self.keys and self.values are views of what is used

    def update(self, keys, values, *args, **kwargs):
        used = self.get_seq_length()
        new = used + keys.shape[2]
        if self.space is None or new > self.space[0].shape[2]:
            before = (self.keys, self.values) if used else ()
            self.lazy_initialization(keys, values)
            self.space = tuple(x.new_empty(*x.shape[:2], new + 64, x.shape[3]) for x in (keys, values))
            for part, old in zip(self.space, before):
                part[:, :, :used] = old
        for part, fresh in zip(self.space, (keys, values)):
            part[:, :, used:new] = fresh
        self.keys, self.values = (part[:, :, :new] for part in self.space)
        return self.keys, self.values

    def batch_select_indices(self, indices) -> None:
        super().batch_select_indices(indices)
        self.space = None


class Reader:
    """By transformers' forward. Prompts are padded on the left."""

    def __init__(self, model, prompts: list[list[int]], pad_id: int):
        self.model, self.device = model, model.device
        sliding = any("sliding" in kind for kind in getattr(model.config, "layer_types", None) or ())
        self.cache = Cache(layer_class_to_replicate=DynamicLayer if sliding else _Layer)
        different = list(_distinct(prompts))
        gaps = [max(map(len, prompts)) - len(p) for p in different]
        ids = [[pad_id] * gap + list(p) for gap, p in zip(gaps, different)]
        mask = [[0] * gap + [1] * len(p) for gap, p in zip(gaps, different)]
        self.mask = torch.tensor(mask, device=self.device)  # (B, T)
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)  # (B, T)
        self._forward(torch.tensor(ids, device=self.device))
        self.keep([different.index(tuple(p)) for p in prompts])

    def _forward(self, ids: torch.Tensor) -> None:
        out = self.model.model(input_ids=ids, attention_mask=self.mask, position_ids=self.positions,
                               past_key_values=self.cache, use_cache=True)
        self.last = out.last_hidden_state[:, -1]  # (B, W)

    def read(self, token: torch.Tensor) -> None:
        """One more token (B,)."""
        self.positions = self.positions[:, -1:] + 1
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        self._forward(token[:, None])

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows, in this order. A row may be named several times: it is copied."""
        at = torch.tensor(rows, device=self.device)  # (B,)
        self.cache.batch_select_indices(at)
        self.last, self.mask, self.positions = self.last[at], self.mask[at], self.positions[at]


# ---- a Llama on the CPU ------------------------------------------------------------------------------------

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
        distinct = _distinct(prompts)
        lengths = torch.tensor([len(p) for p in distinct])
        self.used = int(lengths.max())  # T
        sizes = len(prompts), self.config.num_key_value_heads, self.used + ROOM, self.config.head_dim
        self.space = [torch.zeros(2, *sizes) for _ in self.layers]  # (2, B, H_kv, T + room, D)
        self.positions = torch.tensor([len(p) for p in prompts])  # (B,): of the next token
        hidden = torch.arange(sizes[2]) < self.used - self.positions[:, None]  # (B, T + room)
        self.mask = torch.zeros(hidden.shape).masked_fill(hidden, attention.HIDDEN)[:, None, None]

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
        """As Reader.keep."""
        at = torch.tensor(rows)  # (B,)
        self.space = [part.index_select(1, at) for part in self.space]
        self.last, self.mask, self.positions = self.last[at], self.mask[at], self.positions[at]
