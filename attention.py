"""Attention over the batches of lm.py: packed rows for a sharded model, padded rows on the CPU.

    packed    lm.pack's row of many sequences: each sequence attends to itself alone
    blocks    lm.pad's rows on the CPU: a block of queries meets the keys up to its own end

transformers knows them by these names, as attn_implementation. Shapes: B rows, T queries, S keys, H query
heads, H_kv heads of keys and values, D their width.
"""

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

# torch of CUDA 13 asks cuDNN first, which makes a plan for every new length and never drops it (NOTES 10.11).
# Here, for every program that loads a model, also for those that join no group. What is left, flash-attn's
# kernel and the efficient one, knows no plans. varlen_attn calls the first by its name.
torch.backends.cuda.enable_cudnn_sdp(False)

# ---- packed rows -------------------------------------------------------------------------------------------


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, cu_seq_lens_q=None,
                     max_length_q=None, **_):
    """Causal attention inside each sequence of a packed row (NOTES 10.3): query (1, H, T, D), key and value
    (1, H_kv, T, D) -> (1, T, H, D), None.

    On a GPU by flash-attn where it is installed, else by torch's varlen_attn; on the CPU by sequences.
    """
    assert cu_seq_lens_q is not None and query.shape[0] == 1 and dropout == 0, "not a row of lm.pack"
    if query.is_cuda:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (T, H, D)
        return VARLEN(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None
    pieces = []
    for start, end in zip(cu_seq_lens_q[:-1].tolist(), cu_seq_lens_q[1:].tolist()):
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        pieces.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
    return torch.cat(pieces, 2).transpose(1, 2), None


def _choose_varlen() -> tuple[str, Callable | None]:
    """What this machine has for packed rows: its name, and fn(q, k, v (T, H, D), starts, longest, scale)."""
    if not torch.cuda.is_available():
        return "one sequence at a time (CPU)", None
    try:
        from flash_attn import flash_attn_varlen_func

        return "flash-attn", lambda q, k, v, starts, longest, scale: flash_attn_varlen_func(
            q, k, v, starts, starts, longest, longest, softmax_scale=scale, causal=True)
    except ImportError:
        from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters  # they differ: torch 2.10, 2.12 (NOTES 10.4)
    more = {"is_causal": True} if "is_causal" in takes else {"window_size": (-1, 0)}
    more |= {"enable_gqa": True} if "enable_gqa" in takes else {}

    def varlen(q, k, v, starts, longest, scale):
        if "enable_gqa" not in more and k.shape[1] != q.shape[1]:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        return varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, **more)

    return "torch varlen_attn", varlen


PACKED_BY, VARLEN = _choose_varlen()
AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", lambda *args, **kwargs: None)


# ---- padded rows on the CPU --------------------------------------------------------------------------------

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
