#!/usr/bin/env bash
# The paper's recipe on 8 x H100, from download to a measured agent. docs/gpu.md has what must be there first.
#     bash paper.sh                          # from the published SFT policy
#     POLICY=runs/paper/sft bash paper.sh    # from your own, of Llama (whose licence must be accepted)
#     SMALL=1 bash paper.sh                  # every line on two CPU cores, with vLLM's CPU build (make .venv-vllm/ready)
# RANKS, TP, RUN, SEEDS, TRAIN and EVALUATE can be set, too: EVALUATE="--benchmark webarena_lite --context 24576 ..."
# The same command goes on where it was; where a rank or a server dies, torchrun begins again at the last checkpoint.
# SMALL shows that all of it runs, and no more: SmolLM2-135M annotates, acts, dreams and judges, after 50 steps of SFT.
# As a judge it says yes to whatever ends (24 endings of 24, asked without reasons). So its policy acts hot: rewards
# of a group differ by who writes an action at all, and comes to an end within the horizon.
set -euo pipefail && cd "$(dirname "$0")"
if [ -n "${SMALL:-}" ]; then
  export PATH=$PWD/.venv-vllm/bin:$PATH OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1
  RANKS=2 TP=1 RUN=${RUN:-runs/small} BASE=runs/smollm2 LLAMA=runs/smollm2 SEEDS=1000000:2
  POLICY=$RUN/sft DATA=$RUN/recorded.jsonl SERVE="--max-model-len 8192 --max-num-batched-tokens 8192 --enforce-eager
    --no-enable-chunked-prefill --kv-cache-memory-bytes 500000000 --override-generation-config {\"max_new_tokens\":24}"
  SFT="--context 1024 --tokens 1024 --microbatches 2 --lr 5e-4 --epochs 4" WORLD_MODEL="--lr 2e-3 --epochs 8"
  TRAIN="--judge $BASE --judge-tokens 0 --updates 2 --checkpoint-every 1 --group-size 4 --horizon 3 --temperature 1.5
    --lr 1e-5 --max-new-tokens 48 --context 1024 --world-model-tokens 128 --world-model-context 1024
    --judge-context 1536 --evaluate-seeds 1000000:1 --discard-limit 1"
  for who in policy-engine world-model-server judge-server; do TRAIN+=" --$who.eager --$who.kv-cache-gb 0.3"; done
  EVALUATE="--context 1024 --max-new-tokens 48 --engine.eager --engine.kv-cache-gb 0.3 --tasks click-button enter-text"
  mkdir -p "$RUN" && python lm.py "$BASE"
  gzip -dc recordings/small.jsonl.gz | grep -E '"(click-button|enter-text)", "seed": [0-3],' > "$DATA"
else
  RANKS=${RANKS:-8} TP=${TP:-8} RUN=${RUN:-runs/paper} SERVE= SFT= WORLD_MODEL= TRAIN=${TRAIN:-} SEEDS=${SEEDS:-2000000:10}
  BASE=openai/gpt-oss-120b LLAMA=meta-llama/Llama-3.1-8B-Instruct POLICY=${POLICY:-stanfordnlp/llama8b-nnetnav-live}
  DATA=nnetnav-live/train.jsonl EVALUATE=${EVALUATE:---context 24576 --max-new-tokens 4096}
  mkdir -p "$RUN" && hf download stanfordnlp/nnetnav-live train.jsonl --repo-type dataset --local-dir nnetnav-live
  for who in "$BASE" "${POLICY/#$RUN\/*/$LLAMA}"; do
    hf download "$who" --exclude "original/*" --exclude "metal/*" --local-dir "$who"
  done
fi
END="setpriv --pdeathsig"  # nobody outlives who started him, and keeps the GPUs
ranks() { $END KILL torchrun --standalone --nproc_per_node "$RANKS" --max-restarts "$1" --no-python $END KILL python -u "${@:2}"; }
[ -e "$RUN/annotated" ] || { # why each recorded action had its effect, by a large model: 2 h
  $END TERM python -m vllm.entrypoints.openai.api_server --model "$BASE" --tensor-parallel-size "$TP" --port 8000 $SERVE \
    --host 127.0.0.1 > "$RUN/annotator.log" 2>&1 &
  until curl -sf --noproxy "*" -o /dev/null http://127.0.0.1:8000/health; do kill -0 $! || break; sleep 1; done
  python annotate.py --recorded "$DATA" --out "$RUN/rationales.jsonl"
  kill $! && wait && touch "$RUN/annotated"
} # then the world model 5.5 h, a policy of your own 3 h, 1,000 updates 62 h, and evaluation on real pages
[ -e "$RUN/world_model/training.json" ] || ranks 0 sft.py world_model --base "$BASE" --recorded "$DATA" \
  --rationales "$RUN/rationales.jsonl" --out "$RUN/world_model" $SFT $WORLD_MODEL
[ -e "$POLICY/config.json" ] || ranks 0 sft.py policy --base "$LLAMA" --recorded "$DATA" --out "$POLICY" $SFT
[ -e "$RUN/dream/config.json" ] || ranks 10 train.py --policy "$POLICY" --world-model "$RUN/world_model" --out "$RUN/dream" \
  --recorded "$DATA" --world-model-server.tensor-parallel "$TP" --judge-server.tensor-parallel "$TP" $TRAIN
python evaluate.py --checkpoint "$POLICY" --sampler vllm --seeds "$SEEDS" --out "$RUN/before.jsonl" $EVALUATE
python evaluate.py --checkpoint "$RUN/dream" --sampler vllm --seeds "$SEEDS" --out "$RUN/after.jsonl" $EVALUATE
python evaluate.py --table "$RUN/before.jsonl" "$RUN/after.jsonl"
