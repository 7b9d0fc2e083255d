"""How processes that share a store let each other watch: what happens in a session reaches whoever follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Audience(Protocol):
    """Those elsewhere who follow a session that is at work here."""

    @property
    def there(self) -> bool:
        """Whether there is anybody."""
        ...

    def say(self, data: bytes, address: str | None = None) -> None:
        """Say one line of JSON to all of them, or to one. It may get lost."""
        ...

    def soon(self, flush: Callable[[], None]) -> None:
        """Call `flush` once, before what was said goes out: it may say all that has gathered since in one."""
        ...

    def close(self) -> None: ...


class Following(Protocol):
    """A session that is followed from here."""

    def ask(self) -> None:
        """Ask whoever works on it for all that a newcomer must know."""
        ...

    def close(self) -> None: ...


class Relay(Protocol):
    """Carries what is for watching between the processes of a store. Nothing of it is kept, and some may get lost."""

    batches: int  # that this process has sent

    def serve(self, owner: str, key: str, asked: Callable[[str], None], told: Callable[[bytes], None]) -> Audience:
        """Work on a session: `asked` hears the address of one who begins to follow it, `told` what is told to all."""
        ...

    def follow(self, owner: str, key: str, heard: Callable[[bytes], None]) -> Following:
        """Hear what is said of a session by whoever works on it elsewhere."""
        ...

    def tell(self, owner: str, key: str, data: bytes) -> None:
        """Tell whoever works on a session, wherever that is."""
        ...
