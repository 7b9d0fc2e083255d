"""A small MCP server over stdio, without an SDK: it offers the tools it is given, and records what it receives.

python mcp_server.py LISTING CALLS

LISTING is a JSON file with `tools`, and the result of each under `results`.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def answer(request: dict[str, Any], listing: dict[str, Any], calls: str) -> dict[str, Any] | None:
    params = request.get("params") or {}
    match request["method"]:
        case "initialize":
            info = {"name": "small", "version": "1"}
            return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": listing["tools"]}
        case "tools/call":
            with open(calls, "a") as file:
                file.write(json.dumps(params) + "\n")
            text = listing.get("results", {}).get(params["name"], "fine")
            return {"content": [{"type": "text", "text": text}]}
        case "ping":
            return {}
    return None


def main(listing: str, calls: str) -> None:
    with open(listing) as file:
        known = json.load(file)
    for line in sys.stdin:
        request = json.loads(line)
        result = answer(request, known, calls)
        if result is not None and "id" in request:
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:3])
