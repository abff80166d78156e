"""A laptop's model, made faster: a Llama of 3 M parameters on a CPU. It computes what lm.py computes.

    load(folder, ...)    lm.load, and the three below where the model is a Llama and there is no GPU
    blocks               attention over padded rows: a block of queries meets the keys up to its own end
    hidden               what is scored and learned: what several sequences begin with is computed once
    Llama                stands where lm.Reader stands; it too reads it once

    B rows, T queries, S keys, N nodes (see tree), W model width, H query heads, H_kv heads of keys and
    values, D their width

A laptop's model is so small that transformers' own forward spends most of a token on Python, on casts and on
copies of keys (NOTES 10.5).
"""

from collections.abc import Iterable, Sequence
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
    """lm.load, with what this file has where it knows the model."""
    # Other models may have sinks, windows or soft caps, which `blocks` does not know.
    config = AutoConfig.from_pretrained(lm.check_folder(folder, made_by))
    llama = config.model_type == "llama" and not torch.cuda.is_available()
    model = lm.load(folder, made_by, context, compute, "blocks" if llama else "")
    model.reader, model.hidden = read, hidden if _known(model.model) else None
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
            and not config.attention_dropout
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


# ---- a Llama by hand ---------------------------------------------------------------------------------------

Sequences = dict[tuple[int, ...], list[int]]


def tree(sequences: Iterable[tuple[int, ...]]) -> tuple[list[int], list[tuple[int, int]], Sequences]:
    """What different sequences begin with, each beginning once: a node. Under a causal mask, what a model
    makes of a token depends on the token and on those before it alone.

    Returns for each node its token and where it was first met, (sequence, place); and the nodes of each
    sequence.

    >>> tree([(5, 6, 7), (5, 6, 8)])
    ([5, 6, 7, 8], [(0, 0), (0, 1), (0, 2), (1, 2)], {(5, 6, 7): [0, 1, 2], (5, 6, 8): [0, 1, 3]})
    """
    known: dict[tuple[int, int], int] = {}
    ids, met, nodes = list[int](), list[tuple[int, int]](), Sequences()
    for row, sequence in enumerate(sequences):
        node, nodes[sequence] = -1, []
        for place, token in enumerate(sequence):
            node = known.setdefault((node, token), len(ids))
            if node == len(ids):
                ids.append(token)
                met.append((row, place))
            nodes[sequence].append(node)
    return ids, met, nodes


def _joined(net) -> list[SimpleNamespace]:
    """The weights of each layer, with gradients where they are wanted: those that read the same are one
    matrix, in autocast's type."""
    compute = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    join = lambda *parts: torch.cat([part.weight for part in parts]).to(compute)
    return [SimpleNamespace(
        norm=layer.input_layernorm.weight, mlp_norm=layer.post_attention_layernorm.weight,
        qkv=join(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
        o=join(layer.self_attn.o_proj), gate_up=join(layer.mlp.gate_proj, layer.mlp.up_proj),
        down=join(layer.mlp.down_proj)) for layer in net.layers]


def _forward(net, layers: Sequence[SimpleNamespace], ids: torch.Tensor, places: torch.Tensor, attend,
             wanted=slice(None)) -> torch.Tensor:
    """Tokens (N,) at their places (N,) -> what the head reads at the wanted ones. attend(layer, q, k, v):
    (N, H, D), two of (N, H_kv, D) -> (N, H, D).

    Like LlamaModel under autocast it keeps float32 between the layers, and multiplies matrices in autocast's
    type. Behind the attention of the last layer, what is not wanted is left out: of a prompt, all but its
    last token.
    """
    heads, more, width = (getattr(net.config, name) for name in (
        "num_attention_heads", "num_key_value_heads", "head_dim"))
    norm = lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, net.config.rms_norm_eps)
    with torch.autocast("cpu", enabled=False):
        x = net.embed_tokens(ids)  # (N, W)
        cos, sin = (part[0, :, None] for part in net.rotary_emb(x, places[None]))  # (N, 1, D)
        sin = torch.cat([-sin[..., : width // 2], sin[..., width // 2 :]], -1)  # rotate_half's sign
        for n, layer in enumerate(layers):
            qkv = F.linear(norm(x, layer.norm).to(layer.qkv.dtype), layer.qkv).float()
            qk, v = qkv.view(len(ids), -1, width).split([heads + more, more], 1)
            qk = (qk * cos).addcmul_(qk.roll(width // 2, -1), sin)
            out = attend(n, *qk.split([heads, more], 1), v).flatten(1)  # (N, H x D)
            if n + 1 == len(layers):
                out, x = out[wanted], x[wanted]
            x = x + F.linear(out.to(layer.o.dtype), layer.o)
            gate, up = F.linear(norm(x, layer.mlp_norm).to(layer.gate_up.dtype), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return norm(x, net.norm.weight)


def hidden(model, pairs: Sequence[lm.Pair]) -> torch.Tensor:
    """lm.LM.hidden: what the head reads before each completion token (as many, W), with gradients.

    Each node of the batch's tree is computed once: what is copies of a demonstration, or the same page again,
    is a quarter of what the world model learns. Attention, which is little here, takes all rows.
    """
    ids, met, nodes = tree(lm.distinct([prompt + completion for prompt, completion in pairs]))
    longest = max(map(len, nodes.values()))
    # Behind a row's end stands node 0: under the causal mask none of its own queries sees it.
    at = torch.tensor([row + [0] * (longest - len(row)) for row in nodes.values()])  # (B, T)
    rows, places = torch.tensor(met).unbind(1)  # (N,), (N,)
    first = rows * longest + places  # (N,): where in `at` a node was first met
    layers = _joined(model.model)

    def attend(n: int, *qkv: torch.Tensor) -> torch.Tensor:
        # An embedding's backward takes half the time of an index's.
        q, k, v = (F.embedding(at, part.flatten(1)).unflatten(2, part.shape[1:]).transpose(1, 2)
                   .to(layers[n].qkv.dtype) for part in qkv)  # (B, heads, T, D)
        if q.dtype == torch.float32:  # the CPU's fused attention is faster there, and slower in bf16
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        else:
            out = block_attention(None, q, k, v, None, q.shape[-1] ** -0.5)[0]
        return F.embedding(first, out.flatten(0, 1).flatten(1)).view(qkv[0].shape)

    wanted = [node for prompt, completion in pairs
              for node in nodes[tuple(prompt + completion)][len(prompt) - 1 : -1]]
    return _forward(model.model, layers, torch.tensor(ids), places, attend, torch.tensor(wanted).long())


ROOM = 32  # tokens that the memory of keys and values grows by


class Llama:
    """The prompts' tree is read without padding; then rows are aligned on the right. Keys and values stay
    float32: a query at a time, float32 is faster here than bf16."""

    def __init__(self, model, prompts: list[list[int]]):
        self.net, config = model.model, model.config
        self.layers = _joined(self.net)
        distinct = lm.distinct(prompts)
        self.used = max(map(len, prompts))  # T
        sizes = len(prompts), config.num_key_value_heads, self.used + ROOM, config.head_dim
        self.space = [torch.zeros(2, *sizes) for _ in self.layers]  # (2, B, H_kv, T + room, D)
        self.positions = torch.tensor([len(p) for p in prompts])  # (B,): of the next token
        hidden = torch.arange(sizes[2]) < self.used - self.positions[:, None]  # (B, T + room)
        self.mask = torch.zeros(hidden.shape).masked_fill(hidden, HIDDEN)[:, None, None]
        ids, met, nodes = tree(distinct)
        rows = [(its_rows, torch.tensor(nodes[prompt])) for prompt, its_rows in distinct.items()]

        def attend(n: int, *qkv: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(qkv[0])  # (N, H, D)
            for its_rows, its_nodes in rows:
                q, k, v = (part[its_nodes].transpose(0, 1) for part in qkv)  # (heads, t, D)
                out[its_nodes] = F.scaled_dot_product_attention(
                    q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0].transpose(0, 1)
                for row in its_rows:
                    self.space[n][0, row, :, self.used - len(its_nodes) : self.used] = k
                    self.space[n][1, row, :, self.used - len(its_nodes) : self.used] = v
            return out

        places = torch.tensor(met)[:, 1]  # (N,)
        ends = torch.tensor([its_nodes[-1] for its_nodes in nodes.values()])
        last = _forward(self.net, self.layers, torch.tensor(ids), places, attend, ends)  # of each prompt
        which = {row: k for k, its_rows in enumerate(distinct.values()) for row in its_rows}
        self.last = last[[which[row] for row in range(len(prompts))]]  # (B, W)

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

        self.last = _forward(self.net, self.layers, token, self.positions, attend)
        self.positions = self.positions + 1

    def keep(self, rows: list[int]) -> None:
        """As lm.Reader.keep."""
        at = torch.tensor(rows)  # (B,)
        self.space = [part.index_select(1, at) for part in self.space]
        self.last, self.mask, self.positions = self.last[at], self.mask[at], self.positions[at]
