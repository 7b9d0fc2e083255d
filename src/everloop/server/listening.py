"""Opens the addresses of a server, all on one port."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from ..errors import ConfigError
from .connections import Runner
from .origins import Binding


async def listen(runner: Runner, binding: Binding, port: int, flag: str) -> Sequence[str]:
    """Begin to serve; gives the addresses. One that cannot be had is an error that names the flag for another."""
    await runner.setup()
    for address in binding.addresses:
        try:
            site = web.TCPSite(runner, address, port, reuse_address=True, backlog=1024)
            await site.start()
        except (OSError, OverflowError) as error:
            await runner.cleanup()
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot listen on {address} port {port} ({why}): name another with {flag}") from None
        port = port or runner.addresses[0][1]  # the same one on every address
    return [_shown(*address[:2]) for address in runner.addresses]


def _shown(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
