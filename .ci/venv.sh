#!/usr/bin/env bash
# Makes or refreshes .venv with the package and its development extras. Does nothing, fast, when up to date.
# A python is accepted only after it has been *run*: a pyenv shim on the PATH may exist and refuse.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/.stamp
want=$(cat setup.cfg pyproject.toml | cksum)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then exit 0; fi

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_python() {
  local candidate root
  for candidate in ${PYTHON:-} python3.12 python3.13 python3.14 python3 python; do
    if fits "$candidate"; then command -v "$candidate"; return; fi
  done
  root=${PYENV_ROOT:-$HOME/.pyenv}
  for candidate in "$root"/versions/3.12*/bin/python "$root"/versions/3.1[3-9]*/bin/python; do
    if fits "$candidate"; then echo "$candidate"; return; fi
  done
  return 1
}

if ! { [ -x .venv/bin/python ] && fits .venv/bin/python; }; then
  if ! python=$(find_python); then
    echo "sera_jax needs Python 3.12 or newer, and none was found: looked for python3.12, python3.13," \
         "python3.14, python3 and python on the PATH and for pyenv versions." >&2
    echo "Install one (for example 'pyenv install 3.12') or name it: make PYTHON=/path/to/python3.12 demo" >&2
    exit 1
  fi
  echo "Making .venv with $python ($("$python" -V))"
  rm -rf .venv
  "$python" -m venv .venv
fi
echo "Installing sera_jax and its dependencies into .venv (about a minute)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
echo "$want" > "$stamp"
