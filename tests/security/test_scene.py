"""The scene itself: a successful attack must be detected."""

from __future__ import annotations

from everloop.testing import call


async def test_a_leak_is_noticed(scene):
    attack = await scene.run(call("read_file", path=str(scene.outside / "secret.txt")), restrict_to_workspace=False)
    assert scene.secret in attack.seen
