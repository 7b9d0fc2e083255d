#!/bin/sh
# Renews the pins of the clients that the tests run against the server: the newest versions, with hashes.
# Needs uv and npm. The environments themselves are made by tests/clients/environments.py.
set -eu

cd "$(dirname "$0")/../tests/clients"
for wanted in requirements/*.in; do
    "${UV:-uv}" pip compile --quiet --upgrade --universal --generate-hashes --python-version 3.11 --no-header --no-annotate \
        --no-emit-index-url --no-emit-find-links "$wanted" -o "${wanted%.in}.txt"
done
for folder in node browsers ../../benchmarks/lighthouse; do
    (cd "$folder" && npm install --package-lock-only --ignore-scripts --no-audit --no-fund --omit-lockfile-registry-resolved)
done
