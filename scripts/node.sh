#!/bin/sh
# Installs the MCP servers from the npm registry that the tests talk to, and the type checker of the web page, as pinned
# in tests/mcp_servers. No package's scripts are run. Nothing happens when they are there already.
set -eu

cd "$(dirname "$0")/../tests/mcp_servers"
if ! cmp -s package-lock.json node_modules/.pinned; then
    if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
        echo "everloop: node and npm are not here: the tests that need them will fail;" \
            "install Node.js 20 or newer (Debian/Ubuntu: apt install nodejs npm) and run make setup again" >&2
        exit 0
    fi
    echo "Installing the packages of tests/mcp_servers (checked against their hashes)"
    npm ci --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null || {
        echo "everloop: the packages of tests/mcp_servers could not be installed; see npm's message above (is the network there?)" >&2
        exit 2
    }
    cp package-lock.json node_modules/.pinned
fi
