#!/bin/sh
# Makes .venv in the current folder: the pinned packages, checked against their hashes, then Everloop itself.
# With the argument "dev" it adds the packages for tests, lint and types to a .venv that is there; with "docs" it makes
# .venv-docs, with what builds the site.
set -eu
venv=.venv
[ "${1:-}" != docs ] || venv=.venv-docs

fail() {
    echo "everloop: $*" >&2
    exit 2
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or newer; give the path of one that is"
        echo "$PYTHON"
        return
    fi
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    fail "Python 3.11 or newer is needed and none was found; install it (Debian/Ubuntu: apt install python3" \
        "python3-venv, macOS: brew install python) or set PYTHON=/path/to/python3"
}

make_venv() {
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv module; install it (Debian/Ubuntu: apt install python3-venv) and run make again"
    echo "Making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" || fail "could not make $venv here; see the message above"
}

pip_install() {
    PYTHONUNBUFFERED=1 "$venv/bin/python" -m pip install --disable-pip-version-check "$@"
}

# Not awk: some read a pipe in blocks, and the line would stand still.
count_packages() {
    count=0
    if [ -n "$live" ]; then printf '%s' "$1"; else echo "$1"; fi
    while IFS= read -r line; do
        [ -n "$live" ] || continue
        case $line in
        Collecting* | "Requirement already satisfied"*)
            count=$((count + 1))
            if [ "$count" -le "$2" ]; then printf '\r\033[K%s: %d of %d' "$1" "$count" "$2"; fi
            ;;
        "Installing collected packages"*) printf '\r\033[K%s: unpacking %d' "$1" "$2" ;;
        esac
    done
    if [ -n "$live" ]; then printf '\r\033[K%s: done\n' "$1"; fi
}

# One line counts the packages; pip's own words are shown only if it fails.
# What must be built is built with the pinned tools of requirements.lock, so nothing unpinned is fetched.
install_pinned() {
    live=
    if [ -t 1 ]; then live=1; fi
    rm -f "$venv/.failed"
    { pip_install --require-hashes --no-build-isolation --use-pep517 -r "$1" 2>"$venv/.pip-errors" ||
        touch "$venv/.failed"; } | count_packages "Installing the packages of $1" "$(grep -c '^[a-zA-Z0-9]' "$1")"
    if [ -e "$venv/.failed" ]; then
        cat "$venv/.pip-errors" >&2
        fail "the packages could not be installed; see pip's message above (is the network there?)"
    fi
}

if [ "${1:-}" = docs ]; then
    make_venv
    install_pinned requirements-docs.lock
    touch "$venv/.ready"
    exit
fi
sh "$(dirname "$0")/system.sh" "${1:-}"
if [ "${1:-}" = dev ]; then
    install_pinned requirements-dev.lock
    sh scripts/node.sh &
    node=$!
    echo "Making the environments of the clients that the tests run"
    .venv/bin/python -m tests.clients.environments || [ -z "${CI:-}" ] || fail "the clients could not be installed"
    wait "$node"
    touch .venv/.ready-dev
else
    .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
    rm -f .venv/.ready .venv/.ready-dev
    install_pinned requirements.lock
    pip_install --quiet --no-deps --no-build-isolation --editable . ||
        fail "Everloop itself could not be installed; see pip's message above"
    .venv/bin/python -m compileall -q src || true # a head start only
    pwd -P >.venv/.ready
fi
echo "Ready."
