#!/usr/bin/env bash
# The paper's recipe on a node of 8 x H100, from download to a measured agent: bash node/commands.sh, from the
# repository's root. docs/gpu.md has what must be there first, its GB and hours, and what was never run.
# What is in capitals can be set: OUT=runs/paper/pass TRAIN_FLAGS="--epochs 1" bash node/commands.sh
# The same command again goes on where it was, and repeats nothing that is finished.
set -euo pipefail
RANKS=${RANKS:-8} TP=${TP:-8}                     # processes of the trainer; GPUs that share a server's model
BASE=${BASE:-openai/gpt-oss-120b}                 # the world model's base, and who writes reasons: 65 GB
AGENT=${AGENT:-stanfordnlp/llama8b-nnetnav-live}  # the SFT agent, published: 16 GB
LLAMA=${LLAMA:-meta-llama/Llama-3.1-8B-Instruct}  # with CLONE=yes (and hf auth login) your own is made of it
ROWS=${ROWS:-nnetnav-live} CLONE=${CLONE:-no} RUN=${RUN:-runs/paper} PORT=${PORT:-8000}
OUT=${OUT:-$RUN/dream} SEEDS=${SEEDS:-2000000:10} DATA=$ROWS/train.jsonl
ranks() { torchrun --standalone --nproc_per_node "$RANKS" "$@"; }

# ---- 1. what is published; original/ and metal/ hold the same weights again --------------------------------
fetch() { [ -e "$1/.fetched" ] || { hf download "$1" --local-dir "$1" "${@:2}" && touch "$1/.fetched"; }; }
fetch "$BASE" --exclude "original/*" --exclude "metal/*"
[ -e "$DATA" ] || hf download "stanfordnlp/$ROWS" train.jsonl --repo-type dataset --local-dir "$ROWS"
if [ "$CLONE" = yes ]; then fetch "$LLAMA" --exclude "original/*"; else fetch "$AGENT"; fi

# ---- 2. a reason for each recorded transition, by a server: 2 h --------------------------------------------
if mkdir -p "$RUN" && [ ! -e "$RUN/reasons.done" ]; then
    set -m  # a process group of its own, which is ended as a whole: its engines hold the GPUs
    vllm serve "$BASE" --tensor-parallel-size "$TP" --host 127.0.0.1 --port "$PORT" \
        > "$RUN/annotator.log" 2>&1 & SERVER=$!
    set +m
    trap 'kill -- "-$SERVER"' EXIT
    until curl -sf --noproxy "*" -o /dev/null "http://127.0.0.1:$PORT/health"; do
        kill -0 "$SERVER" || { tail -n 25 "$RUN/annotator.log" >&2; exit 1; }
        sleep 1
    done
    python -m node.annotate --url "http://127.0.0.1:$PORT/v1" --model "$BASE" --transitions "$DATA" \
        --out "$RUN/reasons.jsonl" ${ANNOTATE_FLAGS:-}
    touch "$RUN/reasons.done"
    trap - EXIT; kill -- "-$SERVER"; wait "$SERVER" || true
fi

# ---- 3. world model 5.5 h, with CLONE=yes the agent 3 h, dreams 223 s an update, before and after ----------
[ -e "$RUN/world_model/training.json" ] || ranks sft.py world_model --base "$BASE" --transitions "$DATA" \
    --reasons "$RUN/reasons.jsonl" --out "$RUN/world_model" ${WORLD_MODEL_FLAGS:-}
[ "$CLONE" != yes ] || AGENT=$RUN/sft
[ "$CLONE" != yes ] || [ -e "$AGENT/training.json" ] || ranks sft.py policy --base "$LLAMA" \
    --trajectories "$DATA" --out "$AGENT" ${POLICY_FLAGS:-}
[ -e "$OUT/config.json" ] || ranks train.py --policy "$AGENT" --world-model "$RUN/world_model" --out "$OUT" \
    --trajectories "$DATA" --world-model-server.tensor-parallel "$TP" --judge-server.tensor-parallel "$TP" \
    ${TRAIN_FLAGS:-}
for who in "$AGENT before" "$OUT after"; do set -- $who; [ -e "$OUT.$2.json" ] || python evaluate.py \
    --checkpoint "$1" --run "$OUT.run" --sampler vllm --seeds "$SEEDS" --json "$OUT.$2.json"; done
python evaluate.py --table "$OUT.before.json" "$OUT.after.json"
