"""Before anything large is loaded: what would stop a run, or spoil it. In seconds, and on every rank alike.

    python train.py tiny --preflight         # look, say what was found, and stop

train.py and sft.py always look first (recipe.command). A failure is one sentence with the way
out, and all of them are shown at once. What a run merely drops is said, with its share. What one rank alone
cannot reach (its disk, its GPU, a server) stops all ranks, with the same words.

Headers of weights are read, tokenizers, and some rows of the data; no weights. So lengths are estimated from
bytes. What is dropped is counted exactly when everything is tokenised.

GB is 1e9 bytes, B are bytes.
"""

import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import httpx
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

import data
import distributed
import finetune
import judge
import lm
import policy
import recipe
import remote
import world_model
from data import Trajectory
from distributed import FolderError
from node import gptoss, machine, plan, prepare, server
from node.machine import Found
from node.sizes import GB
from worlds import benchmarks, miniwob

LLAMA_LIKE = ("llama", "qwen2", "qwen3")  # full attention, under the names that lm.py and LoRA look for
WORLD_MODELS = (*LLAMA_LIKE, "gpt_oss")
MOST = 0.9  # share of steps over a limit at which a run would have nearly nothing to learn from
BYTES_A_TOKEN = 3.7  # of a page, where no tokenizer can be asked (NOTES 2.7)
PREPARED = 0.65  # bytes of prepared examples for one of the data (NOTES 2.8)
ROWS = 48  # of the data are looked at


def passes(look: Callable[[object], Found], config) -> bool:
    """Whether the command goes on to its work: not with --preflight. All ranks call it.

    Rank 0 prints what will be dropped, and with --preflight what was found in order. Raises ValueError with
    the failures of all ranks, on all ranks with the same words.
    """
    of_ranks = distributed.gather(look(config))
    if distributed.rank() == 0:
        for line in of_ranks[0].ok if config.preflight else ():
            print(f"ok: {line}")
        for line in of_ranks[0].dropped:
            print(f"dropped: {line}")
    stop(of_ranks)
    if config.preflight and distributed.rank() == 0:
        print("nothing stands in the way")
    return not config.preflight


def stop(of_ranks: Sequence[Found]) -> None:
    """Raises ValueError with the failures of all ranks, where there are any."""
    failed = {line: [] for found in of_ranks for line in found.failed}  # the ranks that found it
    for rank, found in enumerate(of_ranks):
        for line in set(found.failed):
            failed[line].append(rank)
    lines = [line if len(ranks) == len(of_ranks) else f"rank {', '.join(map(str, ranks))}: {line}"
             for line, ranks in failed.items()]
    if lines:
        several = f"{len(lines)} things stand in the way:\n- " if len(lines) > 1 else ""
        raise ValueError(several + "\n- ".join(lines))


# ---- the three commands ------------------------------------------------------------------------------------


def made_by(folder: str, program: str, config: recipe.Train) -> str:
    """The command that makes a missing model, by the recipe that its folder belongs to. "" for the published
    agent, which comes from the hub.

    >>> made_by("runs/paper/world_model", "sft.py world_model", recipe.Train())
    'torchrun --nproc_per_node 8 sft.py world_model'
    """
    if "single" in Path(folder).parts:
        usual = Path(folder).name in ("sft", "world_model")
        return f"python {program} single" + f" --out {folder}, with what node.plan prints" * (not usual)
    if "tiny" in Path(folder).parts or config.sampler == "transformers":
        return f"python {program} tiny"
    return "" if folder == recipe.Train.policy else f"torchrun --nproc_per_node 8 {program}"


def dreaming(config: recipe.Train) -> Found:
    """Before train.train."""
    found, d, vllm = Found(), config.dreaming, config.sampler == "vllm"
    dreamed = config.real_share < 1  # or there is neither world model nor judge
    judged = {"policy": ("--judge-context", config.judge_context), "current": ("--context", config.context),
              "world_model": ("--world-model-context", config.world_model_context)}[d.judge]
    read, apart = {"--context": config.context}, d.judge == "policy" and config.judge_model
    if dreamed and d.judge == "policy" and not apart:
        read[judged[0]] = judged[1]
    agent = model_folder(found, "policy", config.policy, made_by(config.policy, "sft.py policy", config),
                         LLAMA_LIKE, read)
    world = words = None
    judge_of = agent
    if dreamed and apart and not (vllm and config.judge_urls):
        judge_of = model_folder(found, "judge", config.judge_model, "", LLAMA_LIKE, dict([judged]))
    if dreamed and remote.is_url(config.world_model):
        with found.check():
            found.ok.append(f"world model {config.world_model}: {remote.chat(config.world_model).model}")
    elif dreamed and vllm and config.world_model_urls:  # those servers have the weights
        words = tokenizer(found, config.world_model)
    elif dreamed:
        made = made_by(config.world_model, "sft.py world_model", config)
        world = model_folder(found, "world model", config.world_model, made, WORLD_MODELS,
                             {"--world-model-context": config.world_model_context})
    recorded = recording(found, "--trajectories", config.trajectories)
    with found.check():
        recipe.check_recorded(recorded, config, benchmarks.knows(config.on))
    with found.check():
        recipe.check_demonstrations(config)
    of_agent, of_world = agent and agent.words, words if world is None else world.words
    of_judge = {"policy": judge_of and judge_of.words, "current": of_agent, "world_model": of_world}[d.judge]
    limits = [("the policy", of_agent, config.context - d.max_new_tokens,
               "--context less --dreaming.max-new-tokens", POLICY),
              ("the world model", of_world, config.world_model_context - d.world_model_tokens,
               "--world-model-context less --dreaming.world-model-tokens", WORLD),
              ("the judge", of_judge, judged[1] - d.judge_tokens,
               f"{judged[0]} less --dreaming.judge-tokens", JUDGE)]
    lengths(found, recorded, *limits[: 3 if dreamed else 1])
    if config.offload and not (vllm or distributed.world_size() > 1):
        found.failed.append(lm.NO_OFFLOAD)
    if machine.first_here() and (config.evaluate_every or config.real_share > 0):
        with found.check(), miniwob.Browser():  # and closed again: what it lacks shows only then
            found.ok.append("Chromium opens")
    if vllm:
        servers(found, config, judge_of, world)
    if agent:
        files, kept = Path(f"{config.out}.run"), config.keep_checkpoints + 1
        fits(found, config, files / "checkpoint", kept, agent.billions, 2 * agent.billions,
                samplers(found, config, agent, world))
    return found


def samplers(found: Found, config: recipe.Train, agent: "Folder", world: "Folder | None") -> dict[str, float]:
    """GB of those who sample, on each GPU, or of each rank without vLLM. `world` is None where it stands
    elsewhere, or where it was refused."""
    need: dict[str, float] = {}
    if config.sampler != "vllm":
        need["the samplers"] = 4 * (agent.billions + (world.billions if world else 0.0))
    elif world or config.answers_elsewhere or config.real_share == 1:
        with found.check():
            of_agent = plan.read_model(config.policy)
            of_world = plan.read_model(config.world_model) if world else of_agent  # it has no row then
            for sampler in plan.samplers(config, of_agent, of_world, machine.local_ranks()):
                if torch.cuda.is_available():  # the sizes are a GPU's; vLLM's CPU build is for tests
                    need[sampler.name] = sum(row.dreaming for row in sampler.rows())
    return need


def cloning(config: recipe.PolicySFT) -> Found:
    """Before `sft.py policy`."""
    found = Found()
    base = model_folder(found, "base", config.base, recipe.base_made_by(config.base), LLAMA_LIKE,
                        {"--context": config.context})
    recorded = recording(found, "--trajectories", config.trajectories)
    lengths(found, recorded, ("the policy", base and base.words, config.context, "--context", POLICY))
    if config.prepared and not config.demonstrations:
        preparing(found, config.trajectories, "demonstrations")
    with found.check():
        finetune.check_microbatches("policy", config.sft)
    if config.offload and not distributed.grouped():
        found.failed.append(lm.NO_OFFLOAD)
    if base:
        fits(found, config, Path(f"{config.out}.sft"), 2, base.billions, 2 * base.billions, {})
    return found


def learning(config: recipe.WorldModelSFT) -> Found:
    """Before `sft.py world_model`."""
    found = Found()
    base = model_folder(found, "base", config.base, recipe.base_made_by(config.base), WORLD_MODELS,
                        {"--context": config.context})
    if base and base.config.model_type == "gpt_oss" and not config.lora_rank:
        found.failed.append(f"--lora-rank 0 trains all weights, and nothing trains the MXFP4 experts of "
                            f"{config.base}; give --lora-rank 8")
    if base and config.lora_rank:
        with found.check(config.base):
            mergeable(config.base)
    recorded = recording(found, "--transitions", config.transitions)
    lengths(found, recorded, ("the world model", base and base.words, config.context, "--context", WORLD))
    if config.prepared:
        preparing(found, config.transitions, "transitions")
    if config.reasons:
        with found.check(config.reasons):
            written = prepare.read_reasons(config.reasons) if Path(config.reasons).is_file() else {}
            if not written:
                raise ValueError("there are no reasons in it, and every transition would be dropped; make it "
                                 f"(python -m node.annotate --out {config.reasons}), or leave --reasons out")
            found.ok.append(f"--reasons {config.reasons}: {len(written):,} reasons")
    with found.check():
        finetune.check_microbatches("world model", config.sft)
    if base:
        adapters = 8 * config.lora_rank * base.config.hidden_size * base.config.num_hidden_layers / GB
        fits(found, config, Path(f"{config.out}.sft"), 2, adapters or base.billions, base.gb,
                {"the frozen base": 2 * base.billions / distributed.world_size()} if adapters else {})
    return found


def mergeable(folder: str) -> None:
    """Raises FolderError where gptoss.merge would refuse the folder, when all has been learned."""
    entries = distributed.ShardFiles(folder).entries.items()
    adapted = {f"{name}.weight" for name in gptoss.PROJECTIONS}
    dtypes = {entry.dtype for name, entry in entries if ".".join(name.split(".")[-2:]) in adapted}
    if other := ", ".join(sorted(dtypes - {"BF16"})):
        raise FolderError(f"{folder} holds its attention in {other}, and LoRA's adapters (--lora-rank) are "
                          "merged into bf16 alone; fetch the model in bf16, or save it so (transformers: "
                          "from_pretrained(FOLDER, dtype='bfloat16'), then save_pretrained)")


# ---- folders of models -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """A model's folder that can be used: `billions` of weights, `gb` as they lie there."""

    config: PreTrainedConfig
    words: PreTrainedTokenizerBase
    billions: float
    gb: float


def model_folder(found: Found, who: str, folder: str, made_by: str, kinds: Sequence[str],
                 contexts: dict[str, int]) -> Folder | None:
    """The folder, or None where anything is wrong with it. `kinds` of model can be used. `contexts`: the
    lengths that are asked of it, by their flags."""
    failures, config, files = len(found.failed), None, None
    with found.check():
        lm.check_folder(folder, made_by)
    if len(found.failed) > failures:
        return None
    with found.check(f"{folder}/config.json"):
        kind = json.loads((Path(folder) / "config.json").read_text()).get("model_type")
        if kind not in kinds:
            raise FolderError(f"{folder}/config.json: it is a model of type {kind}, and the {who} can be "
                              f"{', '.join(kinds)}; give another folder")
        config = AutoConfig.from_pretrained(folder)
        for flag, tokens in contexts.items():
            if tokens > config.max_position_embeddings:
                found.failed.append(f"{flag} {tokens}: {folder} reads {config.max_position_embeddings} "
                                    "tokens at most (max_position_embeddings); lower it")
    if config is None:
        return None
    with found.check(folder):
        files = distributed.ShardFiles(folder)
        sizes, billions = weights(files, config)
    embedding = files and files.entries.get("model.embed_tokens.weight")
    words = tokenizer(found, folder, embedding.shape[0] if embedding else 0)
    if len(found.failed) > failures:
        return None
    types = ", ".join(f"{gb:,.3g} GB {dtype}" for dtype, gb in sizes.most_common())
    found.ok.append(f"{who} {folder}: {kind}, {billions:,.3g} billion weights ({types})")
    return Folder(config, words, billions, sizes.total())


def weights(files: distributed.ShardFiles, config: PreTrainedConfig) -> tuple[Counter, float]:
    """(GB by dtype, billions of weights) of a folder. Raises FolderError where they are not its config's, and
    for a dtype that nothing here trains."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    gptoss.check(files, model)
    of_dtype = Counter()
    for entry in files.entries.values():
        of_dtype[entry.dtype] += (entry.end - entry.start) / GB
    trained = {"BF16", "F16", "F32"} | ({"U8"} if config.model_type == "gpt_oss" else set())
    if odd := sorted(of_dtype.keys() - trained):
        raise FolderError(f"{files.folder} holds weights in {', '.join(odd)}, which cannot be trained here; "
                          "fetch the model in bf16")
    return of_dtype, sum(parameter.numel() for parameter in model.parameters()) / GB


def tokenizer(found: Found, folder: str, rows: int = 0) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer, or None where it does not do. `rows`: of the embedding, if they are known."""
    with found.check(folder):
        try:
            words = lm.load_tokenizer(folder)
        except Exception as error:  # transformers and tokenizers raise anything
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise FolderError(f"its tokenizer cannot be read ({what}); download it again") from error
        if rows and len(words) > rows:
            raise FolderError(f"its tokenizer has {len(words)} tokens and its embedding {rows} rows; one of "
                              "them is another model's: download it again")
        template = gptoss.template(words)
        if isinstance(template, gptoss.Harmony):
            end = words.decode(template.completion_ids("so", "so")[-1:])
        else:
            end = end_of_turn(words)
        if end and end != words.eos_token:
            raise FolderError(f"a turn ends in {end!r} and the tokenizer's eos_token is {words.eos_token!r}, "
                              "so no answer would end; write the first as eos_token into its "
                              "tokenizer_config.json")
        special = words.get_added_vocab()
        count = lambda text: sum(k in special.values() for k in template.prompt_ids(
            [{"role": "system", "content": "Go."}, {"role": "user", "content": text}]))
        if count(" ".join(special)) != count("Go."):
            raise FolderError("its tokenizer reads special tokens in a page although lm.disarm broke them, "
                              "so a page could end a turn; take another model")
        return words
    return None


def end_of_turn(words: PreTrainedTokenizerBase) -> str:
    """How an assistant's turn ends in the tokenizer's chat template: its eos_token, or what stands in its
    place. "" where a template leaves out what an assistant said."""
    if not words.chat_template:
        raise FolderError("its tokenizer has no chat template; take the model's Instruct version. For a "
                          "published agent: copy chat_template.jinja (or chat_template of its "
                          "tokenizer_config.json) from the model that it was made from")
    said = "So it is."
    chat = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": said},
            {"role": "user", "content": "Go on."}]
    try:
        text = words.apply_chat_template(chat, tokenize=False, date_string=lm.DATE)
        words.apply_chat_template([{"role": "system", "content": "Go."}, chat[0]], tokenize=False)
    except Exception as error:  # jinja's, or the template's own
        raise FolderError(f"its chat template cannot be used ({error}); take another model") from error
    rest = text.partition(said)[2].lstrip()
    if rest.startswith(words.eos_token or "\0"):
        return words.eos_token
    return max(filter(rest.startswith, words.get_added_vocab()), key=len, default=rest[:20])


# ---- data, and how long it is ------------------------------------------------------------------------------


def sample_rows(path: Path, count: int, small: int = 32_000_000) -> tuple[list[tuple[str, dict]], str]:
    """About `count` rows of read_jsonl, from all over a file of which little is read, and what was looked at.

    Raises ValueError where the file is damaged. Of one of more than `small` bytes that is known of its
    beginning, of its end and of those rows (of a .gz, of its beginning).
    """
    size = path.stat().st_size
    if size <= small:
        whole = list(data.read_jsonl(path))
        return whole[:: max(1, -(-len(whole) // count))], f"all of its {len(whole):,} rows can be read"
    if path.suffix == ".gz":
        rows = list(islice(data.read_jsonl(path), count))
        return rows, f"its first {count} rows can be read (more is not seen of a .gz)"
    lines = []
    with path.open("rb") as file:
        for k in range(count):
            file.seek(size * k // count)
            if k:
                file.readline()  # the rest of a row
            lines.append((f"{path}: byte {file.tell()}", file.readline()))
        file.seek(-min(size, 2**24), 2)  # from the end; a row is some kilobytes
        lines.append((f"{path}: its last row", file.read().rstrip().rpartition(b"\n")[2]))
    rows = []
    for place, line in lines:
        try:
            rows += [(place, data.as_object(line))] if line.strip() else []
        except data.DAMAGED as error:
            raise data.unreadable(place, error) from error
    return rows, f"{len(rows)} rows from its beginning to its end can be read"


def recording(found: Found, flag: str, file: str) -> list[Trajectory]:
    """Some trajectories of a recorded file; none where something is wrong with it."""
    with found.check(file):
        path = Path(file)
        if not path.is_file():
            name = path.parent.name
            hub = f"hf download stanfordnlp/{name} {path.name} --repo-type dataset --local-dir {path.parent}"
            fetch = f"fetch it: {hub}" if name.startswith("nnetnav") else f"give another file ({flag})"
            fetch = f"record it: {recipe.RECORD}" if file == recipe.SINGLE_PAGES else fetch
            raise ValueError(f"{file} does not exist; {fetch}")
        rows, seen = sample_rows(path, ROWS)
        trajectories = data.read_trajectories(file, rows)
        if not any(trajectory.steps for trajectory in trajectories):
            raise ValueError(f"{file} holds no trajectory; give another file ({flag})")
        found.ok.append(f"{flag} {file}: {path.stat().st_size / GB:,.2g} GB, {seen}")
        return trajectories
    return []


# What each reads of a step of a trajectory t. The judge: at least one page, and of the other what changed.
POLICY = lambda t, step: policy.messages(t.goal, step.url, step.page, step.previous, t.system)
WORLD = lambda t, step: world_model.messages(step.page, step.url, "".join(step.previous[-1:]), step.action)
JUDGE = lambda t, step: judge.messages(t.goal, step.past, step.page, step.page, whole=False)


def lengths(found: Found, trajectories: Sequence[Trajectory], *limits: tuple) -> None:
    """How many of the steps that were looked at are over each limit, estimated from bytes. A limit is (who
    reads, with which tokenizer, at most so many tokens, by which flags, what: one of the three above)."""
    steps = [(trajectory, step) for trajectory in trajectories for step in trajectory.steps]
    longest = sorted((step.page for _, step in steps), key=len)[-4:]  # what a limit is about
    for who, words, most, flags, chat in limits if steps else ():
        ratio, how = BYTES_A_TOKEN, "NOTES 2.7; no tokenizer could be asked"
        if words:
            tokens = sum(len(words(page).input_ids) for page in longest)
            ratio, how = sum(len(page.encode()) for page in longest) / tokens, "counted on the longest pages"
        if words and words.chat_template:  # which may leave out a part
            write = functools.partial(words.apply_chat_template, tokenize=False, date_string=lm.DATE)
        else:
            write = lambda messages: "".join(message["content"] for message in messages)
        reads = [len(write(chat(*step)).encode()) / ratio for step in steps]
        share = sum(tokens > most for tokens in reads) / len(reads)
        room = f"the {most:,} tokens that {who} may read ({flags})"
        estimate = f"estimated at {ratio:.1f} B a token ({how})"
        if share > MOST:
            found.failed.append(f"about {share:.0%} of the recorded steps are over {room}, {estimate}; give "
                                "it more room")
        elif share:
            found.dropped.append(f"about {share:.0%} of the recorded steps: over {room}, {estimate}")
        else:
            found.ok.append(f"none of {len(reads)} recorded steps is over {room}, {estimate}; the mean is "
                            f"{sum(reads) / len(reads):,.0f}")


# ---- servers, and what a training takes of this machine ----------------------------------------------------


def servers(found: Found, config: recipe.Train, judge_of: Folder | None, world: Folder | None) -> None:
    """vLLM, what our servers ask of GPUs and heads, and servers that stand elsewhere."""
    with found.check():
        server.check_installed()
    if why := distributed.unusable_gpu():
        found.failed.append(f"torch cannot use the GPU that is here: {why}")
    dreamed, asked = config.real_share < 1, []  # else no server is started or asked
    if dreamed and not remote.is_url(config.world_model):
        asked.append(("world-model", config.world_model_urls, config.world_model_server, world,
                      config.world_model_context))
    if dreamed and config.dreaming.judge == "policy":
        asked.append(("judge", config.judge_urls, config.judge_server, judge_of, config.judge_context))
        for url in sorted({*map(root, config.world_model_urls)} & {*map(root, config.judge_urls)}):
            found.failed.append(f"{url} is given for the world model and for the judge, and a server has one "
                                "model; give another, or --dreaming.judge world_model where it shall do both")
    elif dreamed and config.judge_urls:
        found.dropped.append(f"--judge-urls: nobody asks them with --dreaming.judge {config.dreaming.judge}")
    gpus = torch.cuda.device_count()
    machine.compiler(found)
    for name, urls, settings, folder, context in asked:
        for url in urls:
            with found.check(url):
                answering(found, name, url, context)
        tp = settings.tensor_parallel
        if not urls and folder and folder.config.num_attention_heads % tp:
            found.failed.append(f"--{name}-server.tensor-parallel {tp} does not divide the "
                                f"{folder.config.num_attention_heads} attention heads of the model; lower it")
        if not urls:
            machine.shared(found, f"--{name}-server.tensor-parallel", tp)
        if not urls and gpus and tp > gpus:
            found.failed.append(f"--{name}-server.tensor-parallel {tp}: there are {gpus} GPUs here; lower it")


def root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def answering(found: Found, name: str, url: str, context: int) -> None:
    """Raises ValueError where no server answers at `url`, or one of a shorter context."""
    try:
        with remote.connections(10.0, 1) as http:
            answer = http.get(f"{root(url)}/v1/models")
        model = answer.raise_for_status().json()["data"][0]
        longest = int(model["max_model_len"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{url}: {root(url)}/v1/models gives no answer of a vLLM server ({error}); start "
                         f"it, or give other --{name}-urls") from error
    if longest < context:
        raise ValueError(f"{url} serves {longest} tokens (max_model_len), and --{name}-context is {context}; "
                         "start it with more, or lower that")
    found.ok.append(f"{url} serves {model['id']}, {longest:,} tokens")


def fits(found: Found, config, checkpoints: Path, kept: int, learned: float, written: float,
         beside: dict[str, float]) -> None:
    """Memory and disk of a training (see `memory`), which has `kept` checkpoints at most and writes `written`
    GB."""
    memory(found, config, learned, beside)
    if machine.first_here():
        with found.check(config.out):
            need = {f"{kept} checkpoints": kept * 12 * learned, "the model": written}
            machine.disk(found, Path(config.out), need, checkpoints)


def memory(found: Found, config, learned: float, beside: dict[str, float]) -> None:
    """GPU and host memory of a training of `learned` billions of weights in float32. `beside`: GB of what
    else is on each rank's GPU."""
    here, ranks, on_gpu = machine.local_ranks(), distributed.world_size(), torch.cuda.is_available()
    states, aside = 16 * learned / ranks, getattr(config, "offload", False) or not on_gpu
    if on_gpu:
        need = {machine.STATES: states * (not aside), **beside}
        machine.gpu(found, need, getattr(config, "compute", "bfloat16"))
    processes = here * (1 + sum("server" in name for name in beside))
    machine.host(found, {
        machine.STATES: states * here * aside, "a checkpoint on its way": 12 * learned * here / ranks,
        **{name: gb * here * (not on_gpu) for name, gb in beside.items()},
        f"{processes} processes with CUDA": machine.PROCESS * processes * on_gpu})


def preparing(found: Found, file: str, what: str) -> None:
    """Whether there is room for the examples of a file (node/prepare.py). A .gz, whose bytes say little, is
    not looked at; nor is a folder that has examples, which may be those that are wanted."""
    folder = Path(f"{file}.prepared")
    if not machine.first_here() or not Path(file).is_file() or file.endswith(".gz"):
        return
    if not any(folder.glob(f"{what}-*/counts.json")):
        with found.check(file):
            machine.disk(found, folder, {f"prepared {what}": PREPARED * Path(file).stat().st_size / GB},
                         way_out="link the data into a folder on another disk (ln -s), and give the link")
