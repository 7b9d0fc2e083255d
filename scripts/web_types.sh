#!/bin/sh
# Checks the types of the web page's own JavaScript, which are in its comments, with the TypeScript of tests/mcp_servers.
set -eu

cd "$(dirname "$0")/.."
checker=tests/mcp_servers/node_modules/.bin/tsc
if [ ! -x "$checker" ]; then
    echo "everloop: the web page's types are not checked: $checker is missing; install Node.js and run make setup again" >&2
    [ "${CI:-}" != true ] || exit 2
    exit 0
fi
"$checker" --project scripts/web_types.json
