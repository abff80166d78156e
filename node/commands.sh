#!/usr/bin/env bash
# The paper's recipe on a node of 8 x H100, from nothing to a measured agent. From the repository's root:
#
#     bash node/commands.sh                  # all of it; or paste it line by line, into a `bash` of its own
#     OUT=runs/paper/pass TRAIN_FLAGS="--epochs 1" bash node/commands.sh  # what is in capitals can be set
#
# The same command again goes on where it was, and repeats nothing that is finished: what was made with other
# variables stays, unless RUN (all of it) or OUT (the dreams) is another. Ctrl-C ends all of its programs.
# Started with nohup, end it by its group, kill -- -PID: `kill PID` ends the script alone, and the program
# that it waits for goes on. In tmux you have Ctrl-C also after a lost connection.
#
# Once, before (requirements-gpu.txt: the driver, 580 or newer, and flash-attn, which is optional):
#
#     sudo apt-get install -y build-essential python3-dev python3-venv git curl
#     python3 -m venv .venv-gpu && . .venv-gpu/bin/activate    # Python 3.11, 3.12 or 3.13
#     pip install -r requirements.txt -r requirements-gpu.txt
#     vllm download-kernels
#     pip install --no-deps -r requirements-browsergym.txt
#     python -m playwright install --with-deps chromium
#     hf auth login                          # only with CLONE=yes: accept Llama's licence on its page first
#
# Sizes and hours are those of 8 x H100; GB is 1e9 bytes. docs/gpu.md says what has been run of this, and what not.

set -euo pipefail  # pasted: leave this line out, or the first error closes your shell
command -v curl > /dev/null || { echo "curl is missing; apt-get install curl" >&2; exit 1; }

# ---- what can be set ---------------------------------------------------------------------------------------

RANKS=${RANKS:-8}                      # GPUs of this node: processes of the trainer
TP=${TP:-8}                            # GPUs that share each server's model

BASE_NAME=${BASE_NAME:-openai/gpt-oss-120b}                 # on the hub: the world model's base,
AGENT_NAME=${AGENT_NAME:-stanfordnlp/llama8b-nnetnav-live}  # the SFT agent,
LLAMA_NAME=${LLAMA_NAME:-meta-llama/Llama-3.1-8B-Instruct}  # what it was made from,
ROWS_NAME=${ROWS_NAME:-stanfordnlp/nnetnav-live}            # recorded trajectories

BASE=${BASE:-$BASE_NAME}               # their folders here
AGENT=${AGENT:-$AGENT_NAME}
LLAMA=${LLAMA:-$LLAMA_NAME}
ROWS=${ROWS:-nnetnav-live}

FORCE=${FORCE:-no}                     # yes: go on although it does not fit, by the plan, or the disk
CLONE=${CLONE:-no}                     # yes: make the SFT agent from LLAMA, instead of taking AGENT
ANNOTATOR=${ANNOTATOR:-$BASE}          # folder of who writes the reasons of recorded transitions
PORT=${PORT:-8000}                     # of its server,
START_MINUTES=${START_MINUTES:-30}     # and how long it may take to start
RUN=${RUN:-runs/paper}                 # folder of all that is made here
OUT=${OUT:-$RUN/dream}                 # the agent that has learned in dreams
SEEDS=${SEEDS:-2000000:10}             # real pages to measure it on, START:COUNT

PLAN_FLAGS=${PLAN_FLAGS:---ranks $RANKS}  # further flags of each program; its --help explains them
SERVE_FLAGS=${SERVE_FLAGS:-}
ANNOTATE_FLAGS=${ANNOTATE_FLAGS:-}
WORLD_MODEL_FLAGS=${WORLD_MODEL_FLAGS:-}
POLICY_FLAGS=${POLICY_FLAGS:-}
TRAIN_FLAGS=${TRAIN_FLAGS:-}
EVALUATE_FLAGS=${EVALUATE_FLAGS:-}

POLICY=$AGENT START=$AGENT START_NAME=$AGENT_NAME  # POLICY is made of START
if [ "$CLONE" = yes ]; then POLICY=$RUN/sft START=$LLAMA START_NAME=$LLAMA_NAME; fi
mkdir -p "$RUN"

# ---- 1. what it takes: GB of each GPU, of host and disk, hours. No weights, no GPU; a minute ---------------

# Every time: flags and models may be others than the last time. It knows a model by its folder, or by a name
# of node/sizes.py; of another fetch the config first: hf download NAME config.json --local-dir NAME.
# It has flags for the dreams alone: both fine-tunings are planned as the recipe has them, without
# WORLD_MODEL_FLAGS, POLICY_FLAGS and another BASE.
known() { if [ -e "$1/config.json" ]; then echo "$1"; else echo "$2"; fi; }  # FOLDER NAME
too_large() { grep "DOES NOT" "$RUN/plan.txt"; }

python -m node.plan $PLAN_FLAGS --train-flags="--policy $(known "$START" "$START_NAME") \
--world-model $(known "$BASE" "$BASE_NAME") --world-model-server.tensor-parallel $TP \
--judge-server.tensor-parallel $TP $TRAIN_FLAGS" | tee "$RUN/plan.txt" || [ "$FORCE" = yes ]
if [ "$FORCE" != yes ] && too_large; then
    echo "$RUN/plan.txt says what to change; FORCE=yes goes on all the same" >&2
    exit 1
fi

# ---- 2. what is published ----------------------------------------------------------------------------------

fetch() {  # NAME FOLDER ...: not again what is whole, nor over a folder that did not come from the hub
    [ ! -e "$2/.fetched" ] || return 0
    if [ ! -e "$2/.cache/huggingface" ] && [ -e "$2/config.json" -o -e "$2/train.jsonl" ]; then return 0; fi
    hf download "$1" --local-dir "$2" "${@:3}" && touch "$2/.fetched"
}

# The base of an agent of our own: 16 GB, and a licence to accept; original/ holds the weights again.
if [ "$CLONE" = yes ]; then fetch "$LLAMA_NAME" "$LLAMA" --exclude "original/*"; fi

# Or the published agent: 16 GB. Where there are only .bin files, they become safetensors (16 GB more); an
# index is written.
if [ "$CLONE" != yes ]; then
    fetch "$AGENT_NAME" "$AGENT"
    python -m node.convert "$AGENT"
fi

# 3.2 GB, 48,333 rows; the test rows stay where they are.
fetch "$ROWS_NAME" "$ROWS" train.jsonl --repo-type dataset

# 65 GB. original/ and metal/ hold the same weights twice more (196 GB in all).
fetch "$BASE_NAME" "$BASE" --exclude "original/*" --exclude "metal/*"

# ---- 3. what would stop the trainings: said now, in seconds, and not after hours ---------------------------

LOOKS=$RUN/preflight.txt
: > "$LOOKS"
[ -e "$RUN/world_model/training.json" ] || torchrun --standalone --nproc_per_node "$RANKS" \
    sft.py world_model --base "$BASE" --transitions "$ROWS/train.jsonl" --out "$RUN/world_model" \
    $WORLD_MODEL_FLAGS --preflight | tee -a "$LOOKS"
if [ "$CLONE" = yes ] && [ ! -e "$RUN/sft/training.json" ]; then
    torchrun --standalone --nproc_per_node "$RANKS" sft.py policy --base "$LLAMA" \
        --trajectories "$ROWS/train.jsonl" --out "$RUN/sft" $POLICY_FLAGS --preflight | tee -a "$LOOKS"
fi

# The dreams too: the bases have the kinds, sizes and tokenizers of the models that are made of them.
[ -e "$OUT/config.json" ] || torchrun --standalone --nproc_per_node "$RANKS" \
    train.py --policy "$START" --world-model "$BASE" \
    --trajectories "$ROWS/train.jsonl" --out "$OUT" \
    --world-model-server.tensor-parallel "$TP" --judge-server.tensor-parallel "$TP" $TRAIN_FLAGS --preflight \
    | tee -a "$LOOKS"

# Each has looked whether the disk holds its own files. Here those of all: what stays, and the largest
# checkpoints, as a fine-tuning removes its own at its end. It told them in lines like this:
# ok: disk of WHERE: ALL GB (2 checkpoints SOME, the model MORE) of FREE GB that are free on DISK
disks_hold() {
    awk '/^ok: disk of / {
        inner = $0; sub(/^[^(]*\(/, "", inner); sub(/\).*/, "", inner)
        stays = 0; parts = split(inner, part, ", ")
        for (k = 1; k <= parts; k++) {
            words = split(part[k], word, " ")
            if (part[k] !~ /checkpoints/) stays += word[words]
        }
        all[$NF] += stays
        if ($5 - stays > most[$NF]) most[$NF] = $5 - stays
        gsub(",", "", $(NF - 6)); free[$NF] = $(NF - 6) + 0
    } END {
        for (disk in free) if (all[disk] + most[disk] > free[disk]) {
            printf "%s: all trainings together write %.0f GB, ", disk, all[disk] + most[disk]
            printf "and %.0f are free; ", free[disk]
            print "make room there, or give RUN or OUT on another disk. FORCE=yes goes on all the same"
            short = 1
        }
        exit short
    }' "$LOOKS" >&2
}
disks_hold || [ "$FORCE" = yes ]

# ---- 4. a reason for each recorded transition, by a server that is stopped at the end. 2 h -----------------

# Before its first question node.annotate compares all pages, on all cores: some minutes.

stop_server() {  # and all of its processes: the engines hold the GPUs
    kill -TERM -- "-$SERVER" || return 0
    for _ in $(seq 60); do kill -0 "$SERVER" || break; sleep 0.5; done
    kill -KILL -- "-$SERVER" || return 0
} 2>/dev/null

if [ ! -e "$RUN/reasons.done" ]; then
    if (: < "/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; then
        echo "port $PORT is taken: is a server of an earlier run left? PORT=8001 takes another" >&2
        exit 1
    fi
    # What `vllm serve` starts, as a process group, which is ended as a whole. This alone: a training in a
    # group of its own would outlive Ctrl-C and kill.
    set -m
    VLLM_NO_USAGE_STATS=1 python -m vllm.entrypoints.openai.api_server \
        --model "$ANNOTATOR" --tensor-parallel-size "$TP" --host 127.0.0.1 --port "$PORT" \
        $SERVE_FLAGS < /dev/null > "$RUN/annotator.log" 2>&1 &
    SERVER=$!
    set +m
    SINCE=$SECONDS
    trap stop_server EXIT  # also when something below fails, or is interrupted
    until curl --silent --fail --noproxy "*" --output /dev/null "http://127.0.0.1:$PORT/health"; do
        if ! kill -0 "$SERVER" 2>/dev/null || [ $((SECONDS - SINCE)) -ge $((60 * START_MINUTES)) ]; then
            tail -n 25 "$RUN/annotator.log" >&2
            echo "the annotator's server did not start in $START_MINUTES minutes (START_MINUTES); all that" \
                "it said: $RUN/annotator.log" >&2
            exit 1
        fi
        sleep 1
    done
    if python -m node.annotate --url "http://127.0.0.1:$PORT/v1" --model "$ANNOTATOR" \
        --transitions "$ROWS/train.jsonl" --out "$RUN/reasons.jsonl" $ANNOTATE_FLAGS; then
        touch "$RUN/reasons.done"
    fi
    stop_server
    trap - EXIT
fi
if [ ! -e "$RUN/reasons.done" ]; then
    echo "the annotation is not finished; the same command goes on with it" >&2
    exit 1
fi

# ---- 5. the world model: LoRA on the base's attention, merged. 5.5 h, 65 GB --------------------------------

[ -e "$RUN/world_model/training.json" ] || torchrun --standalone --nproc_per_node "$RANKS" \
    sft.py world_model --base "$BASE" --transitions "$ROWS/train.jsonl" --reasons "$RUN/reasons.jsonl" \
    --out "$RUN/world_model" $WORLD_MODEL_FLAGS

# ---- 6. the SFT agent, where it is not the published one. 3 h, 16 GB ---------------------------------------

if [ "$CLONE" = yes ] && [ ! -e "$RUN/sft/training.json" ]; then
    torchrun --standalone --nproc_per_node "$RANKS" sft.py policy --base "$LLAMA" \
        --trajectories "$ROWS/train.jsonl" --out "$RUN/sft" $POLICY_FLAGS
fi

# ---- 7. dream. 223 s an update; OUT.run/ has metrics, dreams, checkpoints ----------------------------------

[ -e "$OUT/config.json" ] || torchrun --standalone --nproc_per_node "$RANKS" \
    train.py --policy "$POLICY" --world-model "$RUN/world_model" \
    --trajectories "$ROWS/train.jsonl" --out "$OUT" \
    --world-model-server.tensor-parallel "$TP" --judge-server.tensor-parallel "$TP" $TRAIN_FLAGS

# ---- 8. before and after, on real pages --------------------------------------------------------------------

[ -e "$OUT.before.json" ] || python evaluate.py --checkpoint "$POLICY" --run "$OUT.run" --sampler vllm \
    --seeds "$SEEDS" --json "$OUT.before.json" $EVALUATE_FLAGS
[ -e "$OUT.json" ] || python evaluate.py --checkpoint "$OUT" --sampler vllm \
    --seeds "$SEEDS" --json "$OUT.json" $EVALUATE_FLAGS
python evaluate.py --table "$OUT.before.json" "$OUT.json"
