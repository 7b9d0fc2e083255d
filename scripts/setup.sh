#!/bin/sh
# Makes .venv in the current folder: the pinned packages, checked against their hashes, then Everloop itself.
set -eu

fail() {
    echo "everloop: $*" >&2
    exit 2
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or newer; give the path of one that is"
    python=$PYTHON
else
    python=
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if new_enough "$name"; then python=$name && break; fi
    done
    [ -n "$python" ] || fail "Python 3.11 or newer is needed and none was found; install it (Debian/Ubuntu:" \
        "apt install python3 python3-venv, macOS: brew install python) or set PYTHON=/path/to/python3"
fi
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv module; install it (Debian/Ubuntu: apt install python3-venv) and run make again"

rm -f .venv/.installed
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv || fail "could not make .venv here; see the message above"
fi

echo "Installing the packages of requirements.lock (checked against their hashes)"
# Only the names are shown; pip's warnings and errors go to standard error untouched.
status=$(
    {
        { .venv/bin/python -m pip install --disable-pip-version-check --require-hashes -r requirements.lock || echo "failed" >&3; } |
            awk '/^(Collecting|Processing) / { sub(/.*\//, "", $2); print "  " $2; fflush() }' >&4
    } 3>&1
) 4>&1
[ -z "$status" ] || fail "the packages could not be installed; see pip's message above (is the network there?)"
.venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable . ||
    fail "Everloop itself could not be installed; see pip's message above"
pwd -P >.venv/.installed
echo "Ready."
