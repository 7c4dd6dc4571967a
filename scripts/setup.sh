#!/usr/bin/env bash
# Makes .venv with gemmtune (editable) and what its tests need. Does nothing where that is done
# already; starts over where it was left half made, or the folder or the Python has moved.
#   PYTHON   the Python to use (default python3)
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*" >&2; }
fail() { say "$@"; exit 1; }
ask() { "$python" -c "import importlib.util, sys; $1"; }

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "no $python here: install Python 3.10 or newer," \
  "or name one: make PYTHON=/path/to/python3"
if [ "$(ask 'print(sys.prefix)')" = "$PWD/.venv" ]; then # activated: it must not replace itself
  python=$(ask 'print(sys._base_executable)')
fi
version=$(ask 'print("%d.%d.%d" % sys.version_info[:3])')
ask 'sys.exit(sys.version_info < (3, 10))' || fail "$python is Python $version, and gemmtune needs" \
  "3.10 or newer: name another, as in make PYTHON=python3.11"
ask 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module: on Debian or Ubuntu," \
  "apt install python3-venv; elsewhere name another Python, as in make PYTHON=python3.11"

where="$PWD $(ask 'print(sys.base_prefix)') $version"
what=$(cat pyproject.toml constraints/cpu.txt scripts/setup.sh | cksum)
ready=.venv/ready
if [ -f "$ready" ] && [ "$(head -n 1 "$ready")" = "$where" ] && .venv/bin/python -c ''; then
  [ "$(tail -n 1 "$ready")" != "$what" ] || exit 0
else
  rm -rf .venv
fi

options=()
install=(-e '.[test]')
if [ -e /dev/nvidiactl ] || [ -e /dev/kfd ]; then
  # The torch of a GPU machine fits its driver: keep it, where a new environment can see it.
  if ask 'sys.exit(sys.prefix != sys.base_prefix or not importlib.util.find_spec("torch"))'; then
    options=(--system-site-packages)
  elif [ -e /dev/kfd ]; then
    say "an AMD GPU, but no torch in $python: pip installs one without ROCm, which uses the CPU;" \
      "for the GPU, name the Python that has ROCm's torch: make PYTHON=/path/to/python3"
  fi
else
  install=(-c constraints/cpu.txt "${install[@]}")
fi

say "setting up .venv with Python $version; the first time takes a minute or two"
rm -f "$ready"
[ -x .venv/bin/python ] || "$python" -m venv ${options[@]+"${options[@]}"} .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check "${install[@]}" ||
  fail "pip could not install gemmtune's dependencies (see above); then try again: make venv"
printf '%s\n%s\n' "$where" "$what" >"$ready"
