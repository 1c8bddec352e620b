#!/usr/bin/env bash
# Everything that is measured on a GPU, in stages of a few minutes: tests of the kernels first, then the clocks.
#
#   scripts/gpu_suite.sh [--dry] [--out DIR] [--wheels DIR] [STAGE...]
#
# Stages: tests kernels steps lengths answers long, in this order the whole suite; models and diffusion only by name.
# A stage writes DIR/STAGE.json (or .txt). One that is there and done is not run again, so a suite that was ended goes
# on. DIR is results/gpu/NAME, after the GPU. Red tests end the suite: nothing is timed after them.
#
# It runs from a checkout, without a network and without an installation: Python 3.12, torch 2.11, triton 3.6 and
# transformers 5.17 are there, and the wheels of WHEELS lie in a folder (.whl, or --wheels) where Python lacks them.
# Where a command may take ten minutes: `tests kernels`, then `steps lengths`, then `answers long`. How long a stage takes
# on a GPU was not measured yet; one that takes longer than ENOUGH ends with the cells that it has.
# --dry runs every stage on a CPU, with two small layers, so that this file cannot rot.
set -euo pipefail
cd "$(dirname "$0")/.."

WHEELS=(pydantic pydantic_core annotated_types typing_inspection)
STAGES=(tests kernels steps lengths answers long)
CORE=(snapkv adakv h2o kivi quest shadowkv)
ENOUGH=420 LIMIT=480 # seconds of a stage: after the first nothing more is begun, after the second it is ended

dry='' out='' wheels=.whl stages=()
while (($#)); do
  case $1 in
    --dry) dry=yes ;;
    --out) out=$2; shift ;;
    --wheels) wheels=$2; shift ;;
    tests | kernels | steps | lengths | answers | long | models | diffusion) stages+=("$1") ;;
    *) echo "gpu_suite: unknown '$1'. Stages: ${STAGES[*]} models diffusion. Options: --dry --out DIR --wheels DIR." >&2; exit 2 ;;
  esac
  shift
done
((${#stages[@]})) || stages=("${STAGES[@]}")

python=$(command -v python3)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

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
  [[ -f $1 ]] && { [[ $1 == *.txt ]] && tail -n 1 "$1" | grep -q '^green' || grep -q '"status": *"done"' "$1"; }
}

bench() { # a stage's file, then what `kvbench bench` takes
  local file=$1; shift
  local kernels=(--kernels triton --device cuda)
  [[ $dry ]] && kernels=(--kernels torch --device cpu)
  local code=0
  timeout "$LIMIT" "$python" -c 'from kvbench.cli import main; main()' bench "${kernels[@]}" "$@" --seconds "$ENOUGH" --out "$file" \
    >/dev/null || code=$? # its table; all of them come last
  [[ -s $file ]] || { echo "gpu_suite: kvbench bench ended with code $code before its first cell." >&2; exit 1; }
  case $code in
    0) ;;
    1) echo "gpu_suite: some cells failed; ${file##*/} says which." >&2 ;;
    124) echo "gpu_suite: ended after $LIMIT s; ${file##*/} has the cells until then." >&2 ;;
    *) echo "gpu_suite: kvbench bench ended with code $code." >&2; exit "$code" ;;
  esac
}

methods() { printf -- '--method %s ' "$@"; }

run_stage() {
  local stage=$1 file=$out/$1.json
  # shellcheck disable=SC2046  # words are what is wanted
  if [[ $dry ]]; then
    local small=(--model random:two-layers --length 256 --rounds 2)
    case $stage in
      tests) test_kernels tests/kernels/test_choice.py ;;
      kernels) bench "$file" "${small[@]}" $(methods snapkv kivi) --budget 25% --timing kernel --state synthetic ;;
      steps) bench "$file" "${small[@]}" $(methods snapkv h2o) --budget 25% --timing step --state synthetic ;;
      lengths) bench "$file" "${small[@]}" --method snapkv --budget 25% --timing step --batch 1,max --memory 0.02 --state synthetic ;;
      answers | long | models) bench "$file" "${small[@]}" --method snapkv --budget 25% --timing end-to-end ;;
      diffusion) bench "$file" --model mini-diffusion --method dkv-cache-decode --length 64 --rounds 1 --timing end-to-end ;;
    esac
    return
  fi
  local llama=(--model random:llama-3.1-8b --budget 25%)
  # shellcheck disable=SC2046
  case $stage in
    tests) test_kernels tests/kernels tests/runs/test_kernels.py ;;
    kernels) bench "$file" "${llama[@]}" --method all --timing kernel --state synthetic --length 32768 --batch 8 ;;
    steps) bench "$file" "${llama[@]}" --method all --timing step --state synthetic --length 32768 --batch 4 ;;
    lengths) bench "$file" "${llama[@]}" $(methods "${CORE[@]}") --timing step --state synthetic --length 4096,131072 --batch 4,max ;;
    answers) bench "$file" "${llama[@]}" $(methods "${CORE[@]}") --timing end-to-end --length 32768 ;;
    long) bench "$file" "${llama[@]}" --method snapkv --timing end-to-end --length 131072 ;;
    models)
      for model in qwen3-8b llama-2-7b qwen2.5-7b; do
        bench "$out/$model.json" --model "random:$model" --budget 25% $(methods snapkv kivi) --timing step --state synthetic --length 32768 --batch 1,4
      done ;;
    diffusion) bench "$file" --model random:llada-8b $(methods dkv-cache-decode fast-dllm-dual) --timing end-to-end --length 512 ;;
  esac
}

test_kernels() { # pytest as pyproject.toml says, but for what a bare machine has; then the clocks' own test
  local log=$out/tests.txt code=0
  local -a all=("$python" -m pytest -q -o minversion=8 -o addopts=--import-mode=importlib -o filterwarnings=default -p no:cacheprovider)
  if [[ $dry ]]; then
    "${all[@]}" "$@" >"$log" 2>&1 || code=$?
  else # most of the time is the compiler's, so many at a time
    timeout "$LIMIT" "${all[@]}" -n 12 -m 'not slow' "$@" >"$log" 2>&1 || code=$?
    ((code)) || timeout "$LIMIT" "${all[@]}" -m gpu tests/bench/test_bench.py >>"$log" 2>&1 || code=$?
  fi
  if ((code)); then
    tail -n 40 "$log" >&2
    ((code != 124)) || echo "gpu_suite: tests took more than $LIMIT s." >&2
    echo "gpu_suite: tests are red, so nothing is timed. All of it: $log" >&2
    exit 1
  fi
  echo "green on $(name_device)" >>"$log"
}

install_missing
name=$(name_device)
out=${out:-results/gpu/$name}
mkdir -p "$out"
echo "gpu_suite: $name, stages ${stages[*]}, results in $out" >&2
for stage in "${stages[@]}"; do
  file=$out/$stage.json
  [[ $stage == tests ]] && file=$out/tests.txt
  if done_already "$file"; then
    echo "gpu_suite: $stage is done: $file" >&2
    continue
  fi
  SECONDS=0
  run_stage "$stage"
  echo "gpu_suite: $stage took $SECONDS s" >&2
done
files=()
for stage in "${stages[@]}"; do
  [[ -f $out/$stage.json ]] && files+=("$out/$stage.json")
done
((${#files[@]} == 0)) || "$python" -m kvbench.bench --brief "${files[@]}"
