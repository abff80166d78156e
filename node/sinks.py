"""Attention sinks in training: gpt-oss's attention through any kernel, by way of one more key.

    softmax over (q k_1, ..., q k_t, s)       s: a learned number for each head, the sink; it has no value

B sequences, H heads (H_kv of keys and values), T positions, D width of a head.

The flash kernels for sinks have no backward, and eager attention needs 64 T^2 numbers a layer (NOTES 8.6).
Here the sink is a key beside the keys: query' = (q, s/scaling), key' = (k, 0), and one more key (0, 1) with
value 0, so that its score is s. torch's own kernels do the rest, and their backward is right.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface,
    create_causal_mask,
    create_sliding_window_causal_mask,
)


def training_attention(name: str, device: torch.device) -> str:
    """`name`, if gpt-oss can be trained with it on `device`. Raises ValueError with the reason for any other
    (NOTES 8.6)."""
    if name in ("sinks", "eager"):  # eager is the reference; its memory grows with the square of the length
        return name
    if name == "flex_attention":
        if device.type != "cuda":
            raise ValueError("flex_attention has attention sinks on a GPU only; take sinks or eager")
        return name
    reason = "has no backward through the attention sinks, or is not known to have one"
    if name == "sdpa":
        reason = "has no attention sinks"
    raise ValueError(f"attention {name!r} {reason}; gpt-oss trains with sinks, eager or (GPU) flex_attention")


def sink_attention(module, query, key, value, attention_mask, scaling, s_aux, sliding_window=None,
                   dropout=0.0, cu_seq_lens_q=None, **_):
    """Causal attention with a sink a head, in memory that grows with the length only.

    query (B, H, T, D), key and value (B, H_kv, T, D), s_aux (H,) -> (B, T, H, D), None. In a packed row (B =
    1, lm.pack) each sequence sees itself alone.
    """
    assert attention_mask is None and dropout == 0 and (cu_seq_lens_q is None or query.shape[0] == 1)
    width, length = query.shape[-1], query.shape[2]
    sink = (s_aux / scaling).to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)  # (B, H, T, 1)
    query = F.pad(torch.cat([query, sink], -1), (0, 7))  # GPU kernels want widths in eights
    key, value = F.pad(key, (0, 8)), F.pad(value, (0, 8))
    bounds = [0, length] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    pieces = []
    for start, end in zip(bounds, bounds[1:]):
        q, k, v = (tensor[:, :, start:end] for tensor in (query, key, value))
        if sliding_window is None or end - start <= sliding_window:
            pieces.append(_whole_with_sink(q, k, v, width, scaling))
        else:
            pieces.append(_window_with_sink(q, k, v, width, scaling, sliding_window))
    return torch.cat(pieces, 2)[..., :width].transpose(1, 2).contiguous(), None


def _by(backend: SDPBackend, query: torch.Tensor) -> contextlib.AbstractContextManager:
    """On a GPU this kernel and no other: a shape that it cannot take raises, where torch would take memory
    for T^2 scores without a word. Neither of the two used here makes a plan for each new length, as cuDNN
    does (NOTES 10.11). The CPU has no such choice."""
    return sdpa_kernel(backend) if query.is_cuda else contextlib.nullcontext()


def _whole_with_sink(query, key, value, width: int, scaling: float) -> torch.Tensor:
    """One sequence of sink_attention, (B, H, T, width + 8), in which a query sees all that is before it."""
    # The sink stands first, where all see it. So a query is put first too, and dropped below.
    query, key, value = (F.pad(tensor, (0, 0, 1, 0)) for tensor in (query, key, value))
    key[:, :, 0, width] = 1.0
    with _by(SDPBackend.FLASH_ATTENTION, query):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling,
                                             enable_gqa=True)
    return out[:, :, 1:]


def _window_with_sink(query, key, value, width: int, scaling: float, window: int) -> torch.Tensor:
    """The same for a sliding layer: a query sees itself and the `window` - 1 keys before it.

    Blocks of `window` queries, each against the sink, the block before and its own block. With a window of 3,
    queries 3, 4, 5 are a block and meet keys 0 to 5; query 4 sees keys 2, 3, 4.
    """
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


AttentionInterface.register("sinks", sink_attention)
AttentionMaskInterface.register("sinks", lambda *args, **kwargs: None)


def mask_packed(model, args, kwargs: dict):
    """Before every forward, for eager and flex_attention: what GptOssModel's forward forgets (transformers
    5.19).

    It does not hand position_ids to the masks, as Llama's does, and the sequences of a packed row would see
    each other without a word (NOTES 8.7).
    """
    ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
    cached = kwargs.get("past_key_values") is not None
    if positions is not None and kwargs.get("attention_mask") is None and not cached:
        shape_only = torch.empty(*ids.shape, 0, dtype=model.config.dtype, device=ids.device)
        given = {"config": model.config, "inputs_embeds": shape_only, "attention_mask": None,
                 "past_key_values": None, "position_ids": positions}
        kwargs["attention_mask"] = {"full_attention": create_causal_mask(**given),
                                    "sliding_attention": create_sliding_window_causal_mask(**given)}
    return args, kwargs
