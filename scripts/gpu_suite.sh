#!/usr/bin/env bash
# Everything that is measured on a GPU, in stages that take less than eight minutes each.
#
#   scripts/gpu_suite.sh [--dry] [--out DIR] [--from DIR] [--wheels DIR] [STAGE...]
#
# Stages, in the order of the default suite:
#   probe    versions, copy bandwidth, flash attention on a chunk, a CUDA graph after a failed capture
#   methods  every method on two layers, with prompts: each operation is compared with torch, and Triton's cache is filled
#   core     kernel and decode step timing of the core methods, Llama-3.1-8B's shape, 32,768 tokens x 4
#   tests    tests of the kernels and of kvbench bench
#   all      as core, every method, the core methods first, in several calls; without keyformer and sparse prefill, whose
#            contexts take minutes there, and leoam, whose steps take seconds
#   answers  end-to-end timing of the core methods at 32,768 tokens
#   lengths  decode steps at 131,072 tokens x 4
#   largest  decode steps at the largest batch, 32,768 tokens
#   long     end-to-end timing of SnapKV at 131,072 tokens
# Only by name: models (other architectures), diffusion, invariants (`kvbench check --device cuda` of every method).
#
# A stage writes DIR/STAGE.json (tests, invariants: .txt) and depends on no other stage. A stage that is done is not run again, and
# one that was interrupted continues with the cells that are missing. --from copies files of an earlier call to DIR,
# where DIR is empty in every call. DIR is results/gpu/NAME by default, after the GPU. A stage that fails, or tests that
# fail, do not keep the others from running; the suite then ends with code 1.
#
# It runs from a checkout, without network and installation, on Python 3.12, torch 2.11, triton 3.6 and transformers 5.17.
# Missing pure Python packages come from wheels in a folder (.whl, or --wheels). Without .git, or with that of an earlier
# copy, set KVBENCH_COMMIT to the commit, or results name no code. A machine that takes 64 MiB takes no results: first
#   git sparse-checkout set --no-cone '/*' '!/results/cpu-2-cores*' '!/results/smollm2*' '!/results/trace'
# On a machine that is lent for ten minutes per command:
#   probe methods core, then tests, then all, then answers, then lengths largest, then long
# --dry runs every stage on a CPU with two small layers, which tests this file.
set -euo pipefail
cd "$(dirname "$0")/.."

WHEELS=(pydantic pydantic_core annotated_types typing_inspection)
STAGES=(probe methods core tests all answers lengths largest long)
CORE=(snapkv adakv kivi quest h2o shadowkv)
EXTRA=60 # seconds after a stage's own deadline, at which it is ended

dry='' out='' from='' wheels=.whl stages=() failed=''
while (($#)); do
  case $1 in
    --out | --from | --wheels) (($# > 1)) || { echo "gpu_suite: $1 needs a folder." >&2; exit 2; } ;;&
    --help) sed -n '2,/^set/{/^set/d;s/^# \?//;p}' scripts/gpu_suite.sh; exit ;;
    --dry) dry=yes ;;
    --out) out=$2; shift ;;
    --from) from=$2; shift ;;
    --wheels) wheels=$2; shift ;;
    probe | methods | core | tests | all | answers | lengths | largest | long | models | diffusion | invariants) stages+=("$1") ;;
    *) echo "gpu_suite: unknown '$1'. Stages: ${STAGES[*]} models diffusion invariants. Options: --dry --out DIR --from DIR --wheels DIR." >&2; exit 2 ;;
  esac
  shift
done
((${#stages[@]})) || stages=("${STAGES[@]}")

python=$(command -v python3)
threads=1
[[ $dry ]] || threads=8 # ShadowKV gathers values on the host
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
export TORCH_CUDNN_SDPA_DEPRIORITIZED=1
if [[ -z ${KVBENCH_COMMIT:-} ]] && commit=$(git rev-parse HEAD 2>/dev/null); then
  [[ -z $(git status --porcelain -- kvbench methods tasks kernels) ]] || commit+=-dirty
  export KVBENCH_COMMIT=$commit
fi

install_missing() {
  local missing=() lacking=() wheel
  for package in "${WHEELS[@]}"; do
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$package') is None)" || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  for package in "${missing[@]}"; do
    compgen -G "$wheels/$package-*.whl" >/dev/null || lacking+=("$package")
  done
  if ((${#lacking[@]})); then
    echo "gpu_suite: Python lacks ${lacking[*]}, and $wheels has no wheel of them. Where there is a network:" >&2
    echo "  python3 -m pip download --only-binary=:all: --python-version 3.12 --implementation cp \\" >&2
    echo "    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d $wheels pydantic # and what it needs" >&2
    exit 2
  fi
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  for package in "${missing[@]}"; do
    wheel=$(compgen -G "$wheels/$package-*.whl" | sort | tail -n 1)
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheel"
  done
  export PYTHONPATH=$PYTHONPATH:$site
}

name_device() {
  if [[ $dry ]]; then echo dry-run; else
    "$python" -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))' || {
      echo "gpu_suite: torch sees no GPU here. Use --dry to try the suite on a CPU." >&2; exit 2; }
  fi
}

done_already() { # a file of a stage that came to its end
  [[ -f $1 ]] || return 1
  case $1 in
    *.txt) tail -n 1 "$1" | grep -q '^green' ;;
    */probe.json) true ;;
    *) grep -q '"status": *"done"' "$1" && ! grep -q '"outcome": *"skipped"' "$1" ;;
  esac
}

bench() { # a stage's file, its seconds, then the options of `kvbench bench`
  local file=$1 seconds=$2 code=0 try left started=$SECONDS
  shift 2
  local kernels=(--kernels triton --device cuda)
  [[ $dry ]] && kernels=(--kernels torch --device cpu)
  for try in 1 2 3; do # code 3: an error made the GPU unusable for the process; the next one continues
    left=$((seconds + started - SECONDS))
    ((left > 0)) || break
    code=0
    timeout $((left + EXTRA)) "$python" -c 'from kvbench.cli import main; main()' bench "${kernels[@]}" "$@" \
      --seconds "$left" --out "$file" >/dev/null || code=$? # all tables are printed at the end
    ((code == 3)) || break
  done
  [[ -s $file ]] || { echo "gpu_suite: kvbench bench ended with code $code before its first cell." >&2; failed=yes; return; }
  case $code in
    0) ;;
    1) echo "gpu_suite: some cells failed; ${file##*/} has the reasons." >&2; failed=yes ;;
    124) echo "gpu_suite: ended after $((left + EXTRA)) s; ${file##*/} has the cells until then." >&2 ;;
    *) echo "gpu_suite: kvbench bench ended with code $code after $try tries." >&2; failed=yes ;;
  esac
}

name_others() { # every other method, without those whose contexts or steps take too long (tests/bench/test_gpu_suite.py)
  "$python" -c 'from kvbench.registry import list_entries
print(*(x.name for x in list_entries("method") if x.models == "autoregressive" and x.name not in ("keyformer", "leoam")
        and x.facts["family"] != "prefill"))'
}

methods() { printf -- '--method %s ' "$@"; }

run_stage() {
  local stage=$1
  # shellcheck disable=SC2046  # words are wanted
  if [[ $dry ]]; then
    local small=(--model random:two-layers --length 256 --rounds 2 --budget 25%) steps=(--timing kernel,step --state synthetic)
    case $stage in
      probe) "$python" scripts/gpu_probe.py "$file" || failed=yes ;;
      tests) run_tests 400 -m 'not slow' tests/kernels/test_choice.py ;;
      invariants) run_tests 400 -m 'not slow' tests/methods/test_check_in_bfloat16.py ;;
      methods) bench "$file" 400 "${small[@]}" --length 512 --method all --timing kernel ;;
      all) bench "$file" 400 "${small[@]}" $(methods snapkv kivi quest) "${steps[@]}" ;;
      core) bench "$file" 400 "${small[@]}" $(methods snapkv h2o) "${steps[@]}" ;;
      lengths) bench "$file" 400 "${small[@]}" --method snapkv --timing step --state synthetic ;;
      largest) bench "$file" 400 "${small[@]}" --method snapkv --timing step --state synthetic --batch max --memory 0.02 ;;
      answers | long | models) bench "$file" 400 "${small[@]}" --method snapkv --timing end-to-end ;;
      diffusion) bench "$file" 400 --model mini-diffusion --method dkv-cache-decode --length 64 --rounds 1 --timing end-to-end ;;
    esac
    return
  fi
  local llama=(--model random:llama-3.1-8b --budget 25%) steps=(--timing kernel,step --state synthetic)
  # shellcheck disable=SC2046
  case $stage in
    probe) "$python" scripts/gpu_probe.py "$file" || failed=yes ;;
    methods) bench "$file" 240 --model random:two-layers --budget 25% --method all --timing kernel,step --length 2048 --batch 2 --rounds 2 ;;
    tests) # most of the time goes into compiling, so many processes run at the same time
      OMP_NUM_THREADS=1 run_tests 420 -n 12 -m 'not slow' tests/kernels tests/runs/test_kernels.py
      run_tests 60 -m gpu tests/bench/test_bench.py ;;
    invariants) OMP_NUM_THREADS=1 run_tests 420 -n 12 -m gpu tests/methods/test_check_in_bfloat16.py ;;
    core) bench "$file" 200 "${llama[@]}" $(methods "${CORE[@]}") "${steps[@]}" --length 32768 --batch 4 ;;
    all) bench "$file" 400 "${llama[@]}" $(methods "${CORE[@]}" $(name_others)) "${steps[@]}" --length 32768 --batch 4 --rounds 8 ;;
    answers) bench "$file" 300 "${llama[@]}" $(methods "${CORE[@]}") --timing end-to-end --length 32768 --rounds 3 ;;
    lengths) bench "$file" 200 "${llama[@]}" $(methods snapkv adakv kivi quest) --timing step --state synthetic --length 131072 --batch 4 ;;
    largest) bench "$file" 200 "${llama[@]}" $(methods snapkv kivi) --timing step --state synthetic --length 32768 --batch max ;;
    long) bench "$file" 200 "${llama[@]}" --method snapkv --timing end-to-end --length 131072 --rounds 2 ;;
    models)
      for model in qwen3-8b llama-2-7b qwen2.5-7b; do
        done_already "$out/$model.json" || bench "$out/$model.json" 90 --model "random:$model" --budget 25% $(methods snapkv kivi) --timing step --state synthetic --length 32768 --batch 1,4
      done ;;
    diffusion) bench "$file" 300 --model random:llada-8b $(methods dkv-cache-decode fast-dllm-dual) --timing end-to-end --length 512 ;;
  esac
}

run_tests() { # seconds, then pytest's arguments; with the options that a machine without plugins supports
  local log=$file seconds=$1 code=0
  shift
  timeout "$seconds" "$python" -m pytest -q -o minversion=8 -o addopts=--import-mode=importlib \
    -o filterwarnings=default -p no:cacheprovider "$@" >>"$log" 2>&1 || code=$?
  if ((code)); then
    tail -n 40 "$log" >&2
    ((code != 124)) || echo "gpu_suite: tests took more than $seconds s." >&2
    echo "gpu_suite: tests failed: $log" >&2
    failed=yes red=yes
  fi
}

install_missing
name=$(name_device)
out=${out:-results/gpu/$name}
mkdir -p "$out"
echo "gpu_suite: $name, stages ${stages[*]}, results in $out" >&2
for stage in "${stages[@]}"; do
  file=$out/$stage.json
  [[ $stage != tests && $stage != invariants ]] || file=$out/$stage.txt
  [[ -z $from || -e $file || ! -f $from/${file##*/} ]] || { cp "$from/${file##*/}" "$file"; chmod u+w "$file"; }
  if done_already "$file"; then
    echo "gpu_suite: $stage is done: $file" >&2
    continue
  fi
  SECONDS=0 red=''
  [[ $file != *.txt ]] || : >"$file"
  run_stage "$stage"
  [[ $file != *.txt || $red ]] || echo "green on $name" >>"$file"
  echo "gpu_suite: $stage took $SECONDS s" >&2
done
files=()
for stage in "${stages[@]}"; do
  [[ $stage == probe || ! -f $out/$stage.json ]] || files+=("$out/$stage.json")
done
((${#files[@]} == 0)) || "$python" -m kvbench.bench --brief "${files[@]}"
[[ -z $failed ]] || exit 1
